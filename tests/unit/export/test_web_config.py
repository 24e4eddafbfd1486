"""The file's settings take effect; whatever is not supported is refused with what is."""

import ssl
from pathlib import Path

import pytest

from kvobs.export.web_config import UnusableError, context
from tests.support.certificates import CLIENTS, Authority


def test_the_settings_take_effect(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    plain = context(authority.web_config())
    assert (plain.verify_mode, plain.minimum_version) == (ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2)
    strict = context(authority.web_config(min_version="TLS13", **CLIENTS))
    assert (strict.verify_mode, strict.minimum_version) == (ssl.CERT_REQUIRED, ssl.TLSVersion.TLSv1_3)
    assert context(authority.web_config(**(CLIENTS | {"client_auth_type": "VerifyClientCertIfGiven"}))).verify_mode == (
        ssl.CERT_OPTIONAL
    )


TLS = "tls_server_config: {cert_file: server.pem, key_file: server.key, "
REFUSED = {
    "": "Expected `object`, got `null`",
    "[": "while parsing a flow node",
    "a: !!timestamp x": "NoneType",
    "basic_auth_users: {a: b}": "unknown field `basic_auth_users`. Allowed: tls_server_config with "
    "cert_file, key_file, client_ca_file, client_auth_type, min_version",
    "tls_server_config: {cert_file: server.pem}": "missing required field `key_file`",
    TLS + "min_version: TLS10}": r"Invalid enum value 'TLS10' - at `\$.tls_server_config.min_version`",
    TLS + "client_auth_type: RequireAnyClientCert}": "Invalid enum value 'RequireAnyClientCert'",
    TLS + "client_auth_type: RequireAndVerifyClientCert}": "client_ca_file needs a client_auth_type that verifies",
    TLS + "client_ca_file: ca.pem}": "client_ca_file needs a client_auth_type that verifies",
    TLS + "client_ca_file: no.pem, client_auth_type: RequireAndVerifyClientCert}": r"No such file .*no\.pem'",
    TLS.replace("server.key", "other.key") + "}": "must be PEM, match each other, and have no password: .*mismatch",
    TLS.replace("server.key", "locked.key") + "}": "must be PEM, match each other, and have no password: ",
}


@pytest.mark.parametrize("text", REFUSED)
def test_unsupported_settings_are_refused(tmp_path: Path, text: str) -> None:
    authority = Authority(tmp_path)
    path = Path(authority.web_config())
    authority.certificate("other")
    authority.lock("server", "locked.key")
    path.write_text(text)
    with pytest.raises(UnusableError, match=REFUSED[text]) as error:
        context(str(path))
    reason = str(error.value.strerror)
    assert str(path) in reason
    assert "\n" not in reason


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnusableError, match=r"No such file .*no\.yml"):
        context(str(tmp_path / "no.yml"))
