"""The tables that are declared once and read by all: options, metrics, spans, findings."""
