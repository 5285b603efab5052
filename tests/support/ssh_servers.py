"""Real OpenSSH servers on hosts of their own, and a client that knows them: keys and configuration below one folder."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from network_hosts import TOOLS, NamespaceHost, needs_network

__all__ = ["SshServers", "needs_ssh", "ssh_servers"]

Test = TypeVar("Test", bound=Callable[..., None])
UP_S = 10.0
PORT = 2222


def needs_ssh(test: Test) -> Test:
    """Skip a test, with the reason, where there is no OpenSSH."""
    marked: Test = pytest.mark.needs("sshd", "ssh", "ssh-keygen")(test)
    return needs_network(marked)


class SshServers:
    """One server on each host, and what a client on another host needs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        self.client_config = folder / "ssh_config"
        self.options = ("-F", str(self.client_config))
        for name in ("host_key", "user_key"):
            keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(keygen, check=True, stdin=subprocess.DEVNULL)
        (folder / "authorized_keys").write_bytes((folder / "user_key.pub").read_bytes())
        self.client_config.write_text(
            f"Host *\n  Port {PORT}\n  User root\n  IdentityFile {folder}/user_key\n  IdentitiesOnly yes\n"
            f"  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )

    def start(self, host: NamespaceHost) -> None:
        """Start a host's server, also again, and wait until it listens."""
        program = shutil.which("sshd", path=TOOLS) or "sshd"
        options = {
            "Port": PORT,
            "HostKey": self._folder / "host_key",
            "AuthorizedKeysFile": self._folder / "authorized_keys",
            "PidFile": self._folder / f"{host.name}.pid",
            "PermitRootLogin": "prohibit-password",
            "StrictModes": "no",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
        }
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        Path("/run/sshd").mkdir(exist_ok=True)
        with open(self._folder / f"sshd.{host.name}.log", "ab") as log:
            server = subprocess.Popen(
                [*host.prefix, program, "-D", "-e", "-f", "/dev/null", *words], stdin=subprocess.DEVNULL, stderr=log
            )
        self._servers[host.name] = server
        deadline = time.monotonic() + UP_S
        probe = [*host.prefix, "sh", "-c", f"exec 3<>/dev/tcp/{host.address}/{PORT}"]
        probe[-3] = "bash"
        while subprocess.run(probe, capture_output=True).returncode != 0:
            if time.monotonic() > deadline or server.poll() is not None:
                raise TimeoutError((self._folder / f"sshd.{host.name}.log").read_text())
            time.sleep(0.02)

    def close(self) -> None:
        for server in self._servers.values():
            server.terminate()
        for server in self._servers.values():
            server.wait(10)


@contextlib.contextmanager
def ssh_servers(folder: Path, hosts: Sequence[NamespaceHost]) -> Iterator[SshServers]:
    """Start a server on each host, and end them."""
    with contextlib.closing(SshServers(folder)) as servers:
        for host in hosts:
            servers.start(host)
        yield servers
