"""One job on four sites that are far apart, pretended on this machine: `python examples/four_sites.py --wire int8`.

Each site is a network namespace with a host's name and address, and a cable of so many Mbit/s to the others, who are so
many milliseconds away. On each, `paceline run` is started, as you would on real sites; it trains examples/gpt.py, or
--script. Needs Linux, root, and the programs ip, tc, nsenter and unshare (Debian: iproute2 and util-linux). Sites are
removed at the end, also after Ctrl-C or SIGTERM. All sites share this machine's cores.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from paceline.testing.network_namespaces import NamespaceHost
from paceline.testing.sites import refusal, sites

PORT = 29500


def command(options: argparse.Namespace, head: NamespaceHost, token: Path) -> list[str]:
    """What is started on every site; on real ones, with the address of one of them and a token file on each."""
    words = [sys.executable, "-m", "paceline", "run", str(options.script), "--workers", str(options.sites)]
    words += ["--hosts", str(options.sites), "--head", f"{head.address}:{PORT}", "--token-file", str(token)]
    parts = [part for part in (options.sync, options.wire) if part]
    plan = "+".join([*parts, f"batch(size={options.batch},micro={options.batch // options.sites})"])
    return [*words, "--threads", "1", "--plan", plan, *options.more]


def run_on(hosts: Sequence[NamespaceHost], options: argparse.Namespace, scratch: Path) -> int:
    """Start the job on each site, show what the first one says, and return its exit status once all have ended."""
    token = scratch / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(16))
    words = command(options, hosts[0], token)
    print(f"on each of {len(hosts)} sites: paceline {' '.join(words[3:])}\n", flush=True)
    with contextlib.ExitStack() as stack:
        programs: list[subprocess.Popen[bytes]] = []
        for host in hosts:
            said = None if host is hosts[0] else stack.enter_context(open(scratch / host.name, "wb"))
            programs.append(subprocess.Popen([*host.prefix, *words], stdout=said, stderr=said))
            stack.callback(end, programs[-1])
        try:
            statuses = [program.wait() for program in programs]
        except KeyboardInterrupt:  # the job hears Ctrl-C, too, and says what becomes of it
            statuses = [program.wait() for program in programs]
    for host, status in zip(hosts[1:], statuses[1:], strict=True):
        if status != statuses[0]:
            print(f"\non {host.name}, exit status {status}:\n{(scratch / host.name).read_text()[-2000:]}")
    return statuses[0]


def end(program: subprocess.Popen[bytes]) -> None:
    """Have the job on a site stop where it has not ended: this program leaves early."""
    if program.poll() is None:
        program.terminate()
        try:
            program.wait(timeout=60)
        finally:
            program.kill()
            program.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sync", default="", help='how replicas agree, as in a plan: "allreduce(algorithm=tree)"')
    parser.add_argument(
        "--wire", default="", help='what travels between them, as in a plan: "int8", "powersgd(rank=4)"'
    )
    parser.add_argument("--batch", type=int, default=8, help="samples of a step, on all sites together (8)")
    parser.add_argument("--mbit", type=float, default=100.0, help="Mbit/s of each site's cable; 0: no limit (100)")
    parser.add_argument("--ms", type=float, default=50.0, help="milliseconds from a site to another, one way (50)")
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--script", type=Path, default=Path(__file__).with_name("gpt.py"))
    parser.add_argument("more", nargs="*", help="more options of `paceline run`, after --")
    options = parser.parse_args()
    if (why := refusal()) is not None:
        parser.error(f"pretended sites cannot be made here: {why}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves every `with` below
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        with sites(scratch, count=options.sites, bits_per_s=options.mbit * 1e6, delay_s=options.ms / 1e3) as hosts:
            return run_on(hosts, options, scratch)


if __name__ == "__main__":
    sys.exit(main())
