"""`kvobs top`: what servers' /metrics say of each child, from one scrape to the next.

The files, in import order:

scrapes   text of /metrics -> numbers, what happened between two scrapes, quantiles
rows      a row for each server and child; sorted, and as JSON
servers   addresses, scrapes over HTTP, again and again
screen    rows -> a picture for a terminal of any width
keys      single keys from a terminal, which gets its settings back
live      the view that all of these make
"""
