from __future__ import annotations

import pytest

from raystow.orchestrator.client.redaction import HIDDEN, redacted, redacted_arguments

_HEX, _MIXED = "0123456789abcdef" * 2 + "01234567", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY1"
SECRETS = [
    (["--wandb-key", "hunter2"], "hunter2"),
    (["--api_key=hunter2"], "hunter2"),
    (["tracker.apiKey=hunter2"], "hunter2"),
    (["--hub-token", "hunter2"], "hunter2"),
    (["+db.password=hunter2"], "hunter2"),
    (["AWS_SECRET_ACCESS_KEY=hunter2"], "hunter2"),
    (["--credentials", "hunter2"], "hunter2"),
    (["--auth", "user:hunter2"], "hunter2"),
    (["DB_PASSWD=hunter2"], "hunter2"),
    (["--passphrase", "hunter2"], "hunter2"),
    (["--url", "https://me:hunter2@example.com/x"], "hunter2"),
    (["https://a.blob.core.windows.net/c?sv=1&sig=hunter2"], "hunter2"),
    (["AKIAIOSFODNN7EXAMPLE"], "IOSFODNN7"),
    (["--login", "hf_abcdefghijklmnop"], "abcdefghijk"),
    (["--use", "sk-proj-abcdefghijklmnop"], "abcdefghijk"),
    (["ghp_abcdefghijklmnopqrst"], "abcdefghijk"),
    (["xoxb-123456789012-abcdef"], "123456789012"),
    (["eyJhbGciOi.eyJzdWIiOiIx.c2lnbmF0dXJl"], "hbGciOi"),
    (["--log-to", _HEX], _HEX),
    (["--with", _MIXED], "wJalrX"),
    (["--note", "-----BEGIN PRIVATE KEY-----\nMIIE"], "MIIE"),
    (["AIzaSyA1234567890abcdefghijk"], "SyA1234567890"),
]
KEPT = [
    "--max-tokens=2048 --num-key-value-heads 8 --lr 3e-4 --token-dropout 0.1",
    "train.py model.tokenizer=meta-llama/Llama-3.1-8B data=s3://bucket/Data1/shards-2026 --keyframes all",
    "torchrun --nproc-per-node 8 /mnt/data/Run2/very/long/path/to/a/training/script/Train_2026_final.py",
]


@pytest.mark.parametrize(("arguments", "secret"), SECRETS, ids=range(len(SECRETS)))
def test_secrets_are_left_out_of_a_command(arguments: list[str], secret: str) -> None:
    text = redacted_arguments(["train.py", "--steps", "100", *arguments, "--last=1"])
    assert secret not in text
    assert HIDDEN in text
    assert text.startswith("train.py --steps 100 ")
    assert text.endswith(" --last=1")


@pytest.mark.parametrize("text", KEPT)
def test_ordinary_arguments_are_kept(text: str) -> None:
    assert redacted_arguments(text.split()) == text


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("api_key", "hunter2", HIDDEN),
        ("tag", "hf_abcdefghijklmnop", HIDDEN),
        ("token", b"hunter2", HIDDEN.encode()),
        ("keys", 3, 3),
        ("why", "the second attempt", "the second attempt"),
    ],
)
def test_notes_have_no_keys(name: str, value: object, shown: object) -> None:
    assert redacted(name, value) == shown
