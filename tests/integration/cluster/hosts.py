"""Several hosts on one machine: network namespaces on a switch, with nodes of Ray and cables that can be pulled."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]
MEMORY = 80 * 1024 * 1024
_OWN = {
    "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",  # or else a file of the user decides, for some of the nodes
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}


def why_not() -> str | None:
    """Why this machine cannot play several hosts; None if it can."""
    if shutil.which("ip") is None:
        return "needs the command ip (package iproute2)"
    trial = f"hr{os.getpid()}trial"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces may not be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", trial], check=True)
    return None


_BOOT = 'hostname "$1" && mkdir -p "$0" /tmp/ray && mount --bind "$0" /tmp/ray && while :; do sleep 60 & wait; done'


class Hosts:
    """Hosts by name, the first at 10.213.7.1, on one switch; each sees only its own processes and files of Ray.

    All that runs there ends with the block.
    """

    def __init__(self, disks: Path, *names: str) -> None:
        self._disks = disks
        self._prefix = f"hr{os.getpid()}"
        self._numbers = {name: number for number, name in enumerate(names, start=1)}
        self._switch = f"{self._prefix}switch"
        self._machines: dict[str, subprocess.Popen[bytes]] = {}
        self._first: dict[str, int] = {}
        """The first process of each."""

    def __enter__(self) -> Self:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for name in self._numbers:
            self._boot(name)
            host = self._space(name)
            _ip("-n", self._switch, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", host)
            _ip("-n", host, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "eth0", "up")
            _ip("-n", host, "link", "set", "lo", "up")
            _ip("-n", self._switch, "link", "set", name, "up")
            self.plug_in(name)
        return self

    def _boot(self, name: str) -> None:
        spaces = ["--net", "--pid", "--uts", "--mount", "--fork", "--mount-proc"]
        boot = ["unshare", *spaces, "sh", "-c", _BOOT, str(self._disks / name), name]
        self._machines[name] = machine = subprocess.Popen(boot, stderr=subprocess.DEVNULL)
        children = Path(f"/proc/{machine.pid}/task/{machine.pid}/children")
        first = until(lambda: children.read_text().split())
        self._first[name] = int(first[0])
        until(lambda: Path(f"/proc/{first[0]}/ns/net").readlink() != Path("/proc/self/ns/net").readlink())
        _ip("netns", "attach", self._space(name), first[0])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, machine in self._machines.items():
            os.kill(self._first[name], signal.SIGKILL)  # and with it all others there
            machine.wait()
            _ip("netns", "del", self._space(name))
        _ip("netns", "del", self._switch)

    def address(self, name: str) -> str:
        """Of a host."""
        return f"10.213.7.{self._numbers[name]}"

    def unplug(self, name: str) -> None:
        """Pull a host's cable: nobody is told, packets just do not arrive."""
        _ip("-n", self._switch, "link", "set", name, "nomaster")

    def plug_in(self, name: str) -> None:
        """Put its cable in again."""
        _ip("-n", self._switch, "link", "set", name, "master", "br0")

    def part(self, one: str, other: str) -> None:
        """Let these two no longer reach each other, while both reach the rest."""
        for here, there in ((one, other), (other, one)):
            entry = (self.address(there), "lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
            _ip("-n", self._space(here), "neighbour", "replace", *entry)

    def processes(self, name: str, named: str) -> list[int]:
        """That run on a host and have this in their command lines, by their numbers on the machine they all are on."""
        listed = subprocess.run(["ip", "netns", "pids", self._space(name)], capture_output=True, text=True, check=True)
        return [int(number) for number in listed.stdout.split() if named in _command_line(number)]

    def begin(self, name: str, command: Sequence[str], **environment: str) -> subprocess.Popen[str]:
        """Start a command on a host."""
        return subprocess.Popen(
            ["nsenter", f"--target={self._first[name]}", "--net", "--pid", "--uts", "--mount", "--", *command],
            env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | _OWN | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ray_node(self, name: str, *options: str, head: str | None = None, cpus: int = 0, **environment: str) -> str:
        """Start a node of Ray on a host, the head where none is named; returns the cluster's address."""
        address = f"{self.address(head or name)}:6379"
        where = ["--head", "--port=6379", "--include-dashboard=false"] if head is None else [f"--address={address}"]
        command = [str(Path(sys.executable).with_name("ray")), "start", *where, f"--num-cpus={cpus}", *options]
        command += [f"--node-ip-address={self.address(name)}", f"--object-store-memory={MEMORY}"]
        started = self.begin(name, command, **environment)
        said, _ = started.communicate(timeout=90)
        if started.returncode:
            raise RuntimeError(said)
        return address

    def _space(self, name: str) -> str:
        return self._prefix + name


def _command_line(process: str) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
