from __future__ import annotations

import pytest

from raystow.orchestrator.client.redaction import HIDDEN, redacted, redacted_arguments, redacted_command

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
    (["--env", "WANDB_API_KEY=hunter2"], "hunter2"),
    (["--header", "Authorization: Bearer hunter2"], "hunter2"),
    (["-H", "x-api-key: hunter2"], "hunter2"),
    (["--config", '{"hub": {"hf_token": "hunter2 and more"}}'], "and more"),
    (["--config={api_key: hunter2, lr: 1}"], "hunter2"),
    (["--connection", "AccountName=a;AccountKey=hunter2;EndpointSuffix=x"], "hunter2"),
    (["-c", "TOKEN=hunter2 python train.py"], "hunter2"),
    (["--user", "admin:hunter2"], "hunter2"),
    (["-u=admin:hunter2"], "hunter2"),
    (["--password", "31415926"], "31415926"),
    (["--db-passwd=31415926"], "31415926"),
    (["/token:hunter2"], "hunter2"),
    (["--secrets", "hunter2"], "hunter2"),
    (["--notify", "https://hooks.slack.com/services/T0/B0/abcdefgh"], "abcdefgh"),
]
KEPT = [
    "--max-tokens=2048 --num-key-value-heads 8 --lr 3e-4 --token-dropout 0.1",
    "train.py model.tokenizer=meta-llama/Llama-3.1-8B data=s3://bucket/Data1/shards-2026 --keyframes all",
    "train.py --total-tokens 300B --eos-token-id=151643 --user bob --address host:8000 --mix=web:0.7,code:0.3 auth=none",
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


def test_a_command_is_split_as_by_a_shell() -> None:
    """Ray has the driver's command as one text."""
    assert redacted_command("train.py --password 'a b' --lr 1") == f"train.py --password {HIDDEN} --lr 1"
    assert redacted_command("train.py 'a --password hunter2") == f"train.py ''\"'\"'a' --password {HIDDEN}"


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("api_key", "hunter2", HIDDEN),
        ("tag", "hf_abcdefghijklmnop", HIDDEN),
        ("token", b"hunter2", HIDDEN.encode()),
        ("keys", 3, 3),
        ("password", 31415926, HIDDEN),
        ("environment", "HF_TOKEN=hunter2 LR=3", f"HF_TOKEN={HIDDEN} LR=3"),
        ("why", "the second attempt", "the second attempt"),
    ],
)
def test_notes_have_no_keys(name: str, value: object, shown: object) -> None:
    assert redacted(name, value) == shown
