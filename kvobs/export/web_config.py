"""Read the exporter's TLS settings from a file in the format of Prometheus's own exporters (``--web.config.file``)."""

import errno
import ssl
from pathlib import Path
from typing import Literal

import msgspec

_CLIENTS = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}


class UnusableError(OSError):
    """A file is missing or malformed, or asks for what is not supported; the reason is in ``strerror``."""


class _Tls(msgspec.Struct, forbid_unknown_fields=True):
    """The supported keys of ``tls_server_config``; files are relative to the folder of the settings."""

    cert_file: str
    key_file: str
    client_ca_file: str | None = None
    client_auth_type: Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"] = "NoClientCert"
    min_version: Literal["TLS12", "TLS13"] = "TLS12"


class _WebConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Without ``basic_auth_users``: they need bcrypt, which vLLM does not bring."""

    tls_server_config: _Tls


def context(path: str) -> ssl.SSLContext:
    """Return the TLS settings that a file asks for, with its certificates as they are now.

    Raises:
        UnusableError: it has none that can be used.
    """
    try:
        return _context(msgspec.yaml.decode(Path(path).read_bytes(), type=_WebConfig), Path(path).parent)
    except msgspec.DecodeError as error:
        reason = f"{error}. Allowed: tls_server_config with {', '.join(_Tls.__struct_fields__)}"
    except (OSError, ValueError, AttributeError, KeyError) as error:  # also of ssl, and of YAML's tags
        reason = str(error)
    raise UnusableError(errno.EINVAL, f"{path}: {' '.join(reason.split())}")


def _context(config: _WebConfig, folder: Path) -> ssl.SSLContext:
    tls, made = config.tls_server_config, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version, made.verify_mode = _VERSIONS[tls.min_version], _CLIENTS[tls.client_auth_type]
    if (made.verify_mode is ssl.CERT_NONE) != (tls.client_ca_file is None):
        raise ValueError("client_ca_file needs a client_auth_type that verifies, and vice versa")
    for name in filter(None, (tls.cert_file, tls.key_file, tls.client_ca_file)):
        (folder / name).open("rb").close()  # errors of ssl name no file
    try:
        made.load_cert_chain(folder / tls.cert_file, folder / tls.key_file, password="")  # never prompts for a password
    except ssl.SSLError as error:
        raise ValueError(
            f"cert_file and key_file must be PEM, match each other, and have no password: {error}"
        ) from None
    if tls.client_ca_file is not None:
        made.load_verify_locations(folder / tls.client_ca_file)
    return made
