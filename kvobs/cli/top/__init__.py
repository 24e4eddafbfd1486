"""`kvobs top`: show each child's numbers from servers' /metrics, between successive scrapes.

The files, in import order:

scrapes   text of /metrics -> numbers, differences of two scrapes, quantiles
rows      a row for each server and child; sorted, and as JSON
servers   addresses, repeated scrapes over HTTP
screen    rows -> lines for a terminal of any width
keys      single keys from a terminal, whose settings are restored
live      the live view
"""
