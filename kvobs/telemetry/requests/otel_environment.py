"""Read the standard OTEL_* variables that several exporters of kvobs share."""

import os

DISABLED = "OTEL_SDK_DISABLED"


def is_disabled() -> bool:
    """Return whether the environment switches OpenTelemetry off."""
    return os.environ.get(DISABLED, "").strip().lower() == "true"


def otlp_protocol(*variables: str) -> str:
    """Return the OTLP protocol of the first variable that is set, "grpc" or "http/protobuf"; without any "grpc".

    Raises:
        ValueError: it is another one.
    """
    protocol = next((value for name in variables if (value := os.environ.get(name))), "grpc")
    if protocol not in ("grpc", "http/protobuf"):
        raise ValueError(f"the OTLP protocol is {protocol!r}, allowed: 'grpc', 'http/protobuf'")
    return protocol
