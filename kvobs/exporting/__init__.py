"""Export the payload: Prometheus metrics and OpenTelemetry spans."""
