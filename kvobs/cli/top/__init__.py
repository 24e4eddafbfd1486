"""`kvobs top`: show each connector's numbers from servers' /metrics, between successive scrapes.

The files, in import order:

scrapes   text of /metrics -> numbers
rows      a row for each server and connector; sorted, and as JSON
servers   addresses, repeated scrapes over HTTP
screen    rows -> lines for a terminal of any width
live      the live view
"""
