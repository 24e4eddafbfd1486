"""Keep the state of the routing: pure state machines that know nothing of vLLM, OpenTelemetry or Prometheus."""
