"""Certificates made on the spot, and a web-config file with them."""

import datetime as dt
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

CLIENTS = {"client_ca_file": "ca.pem", "client_auth_type": "RequireAndVerifyClientCert"}


class Authority:
    """Signs certificates for 127.0.0.1 into a folder, in which ``ca.pem`` is its own."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder, self._name = folder, x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(self._sign(self._name, self._key.public_key(), is_ca=True))

    def certificate(self, name: str) -> tuple[str, str]:
        """Write a certificate and its key; return their paths."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        cert, private = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        cert.write_bytes(self._sign(subject, key.public_key(), is_ca=False))
        private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return str(cert), str(private)

    def lock(self, name: str, locked: str) -> None:
        """Write a certificate's key again, with a password."""
        key = load_pem_private_key((self.folder / f"{name}.key").read_bytes(), None)
        encryption = BestAvailableEncryption(b"secret")
        (self.folder / locked).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))

    def _sign(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, *, is_ca: bool) -> bytes:
        now = dt.datetime.now(dt.UTC)
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        built = x509.CertificateBuilder().issuer_name(self._name).subject_name(subject).public_key(key)
        built = built.serial_number(x509.random_serial_number()).not_valid_before(now - dt.timedelta(1))
        built = built.not_valid_after(now + dt.timedelta(1)).add_extension(names, critical=False)
        built = built.add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        # Python 3.13 refuses certificates without these extensions.
        built = built.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        built = built.add_extension(issuer, critical=False).add_extension(_usage(is_ca), critical=True)
        return built.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def web_config(self, **settings: str) -> str:
        """Write a web-config file whose certificate is ``server``; return its path."""
        self.certificate("server")
        lines = {"cert_file": "server.pem", "key_file": "server.key", **settings}
        path = self.folder / "web-config.yml"
        path.write_text("tls_server_config:\n" + "".join(f"  {key}: {value}\n" for key, value in lines.items()))
        return str(path)

    def trust(self, client: str | None = None) -> ssl.SSLContext:
        """Return the settings of a client that trusts this authority, with a certificate or without."""
        context = ssl.create_default_context(cafile=str(self.ca))
        if client is not None:
            context.load_cert_chain(*self.certificate(client))
        return context


def _usage(is_ca: bool) -> x509.KeyUsage:
    rare = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only")
    never = dict.fromkeys((*rare, "decipher_only"), False)
    return x509.KeyUsage(digital_signature=True, key_cert_sign=is_ca, crl_sign=is_ca, **never)
