"""TLS: the server's own certificate, and what is said where its files are none."""

from __future__ import annotations

import datetime
import signal
import ssl
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.acceptance.command import FAKE, headrace, lines_of, start, traced
from tests.acceptance.serving.process import port_of_ours, wait_until_ready


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """key.pem and cert.pem, signed by itself, for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    for file, encryption in (
        ("key.pem", serialization.NoEncryption()),
        ("locked.pem", serialization.BestAvailableEncryption(b"open sesame")),
    ):
        private = serialization.PrivateFormat.PKCS8, encryption
        (folder / file).write_bytes(key.private_bytes(serialization.Encoding.PEM, *private))
    return folder


def test_certificates_on_both_sides(folder: Path) -> None:
    flags = ("--ssl-keyfile", "locked.pem", "--ssl-keyfile-password", "open sesame", "--ssl-certfile", "cert.pem")
    flags = (*flags, "--ssl-ca-certs", "cert.pem")
    trusting, unknown = (ssl.create_default_context(cafile=folder / "cert.pem") for _ in range(2))
    trusting.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    with (
        port_of_ours() as port,
        traced(start("serve", "--port", str(port), *FAKE, *flags, folder=folder)) as process,
        httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trusting, timeout=60) as client,
    ):
        wait_until_ready(process, f"https://127.0.0.1:{port}", trusting)
        answer = client.post("/v1/embeddings", json={"input": "a text"})
        assert len(answer.json()["data"][0]["embedding"]) == 8
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"https://127.0.0.1:{port}/ready", timeout=60)  # whom nobody has told to trust it
        with pytest.raises(httpx.TransportError):
            httpx.get(f"https://127.0.0.1:{port}/ready", verify=unknown, timeout=60)  # a client without a certificate
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"http://127.0.0.1:{port}/ready", timeout=60)
        process.send_signal(signal.SIGTERM)
        client.close()
        assert process.wait() == 0


def test_who_does_not_trust_a_server_is_told_how_to(folder: Path) -> None:
    with (
        port_of_ours() as port,
        traced(
            start(
                "serve", "--port", str(port), *FAKE, "--ssl-keyfile", "key.pem", "--ssl-certfile", "cert.pem",
                folder=folder,
            )
        ) as process,
    ):  # fmt: skip
        url = f"https://127.0.0.1:{port}"
        wait_until_ready(process, url, ssl.create_default_context(cafile=folder / "cert.pem"))
        (folder / "in.jsonl").write_text('{"text": "a"}\n')
        job = ("run", "--task", "embed", "--endpoint", url, "-i", "in.jsonl", "-o", "out.jsonl", "--attempts", "1")
        for command in (("top", "--once", url), job):
            status, said = headrace(*command, folder=folder)
            assert status != 0
            assert "certificate verify failed" in said
            assert "to trust it, name the file of its certificate or authority (PEM) in SSL_CERT_FILE" in said
            assert headrace(*command, folder=folder, SSL_CERT_FILE=str(folder / "cert.pem"))[0] == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--ssl-keyfile", "key.pem"), "go together"),
        (("--ssl-keyfile", "none.pem", "--ssl-certfile", "cert.pem"), "none.pem"),
        (("--ssl-keyfile", "cert.pem", "--ssl-certfile", "cert.pem"), "cert.pem"),
        (("--ssl-keyfile", "locked.pem", "--ssl-certfile", "cert.pem"), "locked.pem"),
        (("--ssl-ca-certs", "cert.pem"), "needs a server certificate"),
    ],
)
def test_files_that_are_none_are_told_in_one_line(folder: Path, flags: tuple[str, ...], said: str) -> None:
    status, line = headrace("serve", "--port", "0", *FAKE, *flags, folder=folder)
    assert status == 2
    assert said in line
    assert len(lines_of(line)) == 1
