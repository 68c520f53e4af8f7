"""Who may call, and how often."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace import build_app
from headrace.errors import ConfigError
from headrace.serving.auth import Keys, read_keys
from headrace.serving.errors import ApiError


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", f"Bearer {key}".encode())]


def status(keys: Keys, headers: list[tuple[bytes, bytes]]) -> int:
    try:
        account = keys.account(headers)
        if account is not None:
            keys.enter(account)
    except ApiError as error:
        return error.status_code
    return 200


def test_without_keys_everybody_comes_in() -> None:
    assert Keys().account([]) is None


def test_only_a_known_key_comes_in() -> None:
    keys = Keys(read_keys(None, "one, two"))
    assert [status(keys, bearer(key)) for key in ("one", "two", "three", "")] == [200, 200, 401, 401]
    assert status(keys, []) == 401
    assert status(keys, [(b"authorization", b"Basic one")]) == 401
    assert status(keys, [(b"x-api-key", b"two")]) == 200


def test_a_file_names_keys_and_their_limits(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nplain\nalice  k1 per_minute=60 max_concurrent=2 # hers\n\n")
    plain, alice = read_keys(path, None)
    assert (plain.per_minute, plain.max_concurrent) == (None, None)
    assert (alice.name, alice.per_minute, alice.max_concurrent) == ("alice", 60, 2)
    assert b"k1" not in alice.digest


def test_a_key_may_be_an_admins_and_is_known_without_its_place(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("root k1 admin per_minute=60\nk2\n")
    root, plain = read_keys(path, None)
    assert (root.admin, root.per_minute, plain.admin) == (True, 60, False)
    path.write_text("k2\n")
    assert read_keys(path, None)[0].name == plain.name == read_keys(None, "k2")[0].name
    assert "k2" not in plain.name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# nothing", "holds no key"),
        ("alice k1 per_hour=5", "per_hour=5"),
        ("alice k1 per_minute=0", "per_minute=0"),
        ("alice k1 admins", "admins"),
        ("k1 admin", "needs a name"),
        ("k1 per_minute=5", "needs a name"),
        ("one\none", "twice"),
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_keys(path, None)


@pytest.mark.parametrize("value", ["", ",", " ", " , ,", "\t", "\n", "\u00a0,"])
def test_a_variable_without_a_key_is_refused(tmp_path: Path, value: str) -> None:
    path = tmp_path / "keys"
    path.write_text("k1")
    for file in (None, path):  # what was meant to be a key is missing all the same
        with pytest.raises(ConfigError, match="HEADRACE_API_KEYS is set but holds no key"):
            read_keys(file, value)


@pytest.mark.parametrize("key", ["\u200b", "k1\u200b", "\ufeff", "k\x00"])
def test_a_key_that_cannot_be_seen_is_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"k2\nalice {key}", encoding="utf-8")
    for given in ((path, None), (None, f"k2,{key}")):
        with pytest.raises(ConfigError, match="cannot be seen"):
            read_keys(*given)


def test_a_key_is_not_cut_and_a_mark_at_the_start_is_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("\ufeffk#1\nalice k2#3 admin # hers\n#k4\n", encoding="utf-8")
    keys = Keys(read_keys(path, None))
    assert [status(keys, bearer(key)) for key in ("k#1", "k2#3", "k", "k2", "k4")] == [200, 200, 401, 401, 401]


def test_other_keys_are_taken_while_requests_run(tmp_path: Path) -> None:
    path, now = tmp_path / "keys", [0.0]
    path.write_text("alice k1 per_minute=2\nbob k2 admin\n")
    keys = Keys(read_keys(path, None), clock=lambda: now[0])
    alice, bob = keys.account(bearer("k1")), keys.account(bearer("k2"))
    assert alice is not None
    assert bob is not None
    keys.enter(alice)
    keys.enter(bob)
    path.write_text("alice k1 per_minute=2 max_concurrent=8\nalice k3\n")
    assert keys.replace(read_keys(path, None))
    assert not keys.replace(read_keys(path, None))
    assert [status(keys, bearer(key)) for key in ("k1", "k1", "k2", "k3")] == [200, 429, 401, 200]  # no new allowance
    assert not keys.has_admin
    bob.leave()  # its request ends after its key
    assert (keys.use()["bob"].requests, keys.use()["bob"].running) == (1, 0)
    assert keys.use()["alice"].requests == 4
    path.write_text("bob k2 per_minute=1\n")
    assert keys.replace(read_keys(path, None))
    assert [status(keys, bearer("k2")) for _ in range(2)] == [200, 429]
    assert keys.use()["bob"].requests == 3  # a counter does not fall


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(tmp_path / "none", None)


def test_requests_at_the_same_time_are_limited_for_each_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("alice k1 max_concurrent=1\nbob k2")
    keys = Keys(read_keys(path, None))
    assert [status(keys, bearer(key)) for key in ("k1", "k1", "k2", "k2")] == [200, 429, 200, 200]
    alice = keys.account(bearer("k1"))
    assert alice is not None
    alice.leave()
    assert status(keys, bearer("k1")) == 200


def test_requests_a_minute_are_limited_and_come_back_with_time(tmp_path: Path) -> None:
    path, now = tmp_path / "keys", [0.0]
    path.write_text("alice k1 per_minute=2")
    keys = Keys(read_keys(path, None), clock=lambda: now[0])
    assert [status(keys, bearer("k1")) for _ in range(3)] == [200, 200, 429]
    now[0] = 29.0
    assert status(keys, bearer("k1")) == 429
    now[0] = 30.1
    assert [status(keys, bearer("k1")) for _ in range(2)] == [200, 429]


def test_an_app_that_does_not_read_the_variable_says_that_it_is_open(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEYS", "k1")
    build_app(engine="headrace.testing:FakeEngine", keys=read_keys(None, "k1"))
    assert "open to everyone" not in caplog.text
    build_app(engine="headrace.testing:FakeEngine")
    assert "open to everyone" in caplog.text
