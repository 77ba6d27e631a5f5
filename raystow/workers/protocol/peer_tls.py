"""TLS between node workers. Each makes a key and a certificate when it starts; callers get the certificate through Ray and accept
no other. The key stays in the memory of its process.
"""

from __future__ import annotations

import datetime
import functools
import os
import ssl

from ...storage import extras
from ...storage.errors import StateError

PEER_TLS = "RAYSTOW_PEER_TLS"
"""Whether node workers encrypt what they send to each other: ``1`` or ``0``. By default they do as Ray does."""
_RAY_TLS = "RAY_USE_TLS"

# The pair lives as long as its process, and a wrong clock must not end it.
_BEGIN, _END = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 1, 1)  # X.509 takes them as UTC


def wanted() -> bool:
    """Whether the environment asks for TLS. Raises ``StateError`` for another value than 0 or 1."""
    value = os.environ.get(PEER_TLS)
    if value is None:
        return os.environ.get(_RAY_TLS, "0").lower() in ("1", "true")  # as Ray reads it
    if value not in ("0", "1"):
        raise StateError(f"is {value!r:.40}", subject=PEER_TLS, remedy="set it to 1, or to 0 in a network that is isolated")
    return value == "1"


def server_context() -> tuple[ssl.SSLContext, str]:
    """Make a pair; the context of a server that has it, and the certificate (PEM)."""
    with extras.named():
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "raystow node worker")])
    builder = x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number(), _BEGIN, _END)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    certificate = builder.sign(private, hashes.SHA256()).public_bytes(Encoding.PEM)
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # no session is resumed
    # The module reads pairs from files only: this one is in memory.
    descriptor = os.memfd_create("raystow-peer-key", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context, certificate.decode()


@functools.lru_cache(maxsize=4096)
def client_context(certificate: str) -> ssl.SSLContext:
    """The context of a caller of the server with this certificate. Raises ``ssl.SSLError`` if it is none."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate says which worker it is
    context.load_verify_locations(cadata=certificate)
    return context


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
