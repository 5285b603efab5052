#!/usr/bin/env bash
# Installs the programs from Debian that some tests talk to: Slurm (a real one, with nodes on this host) and network namespaces;
# with the word `engines` also OpenSSH's server, etcd and Prometheus, with the word `long` also a browser (300 MB).
# Only what is missing is installed, and only as root on a machine with apt-get; elsewhere those tests are skipped and say so.
set -euo pipefail

programs=(slurmctld=slurmctld slurmd=slurmd srun=slurm-client munged=munge ip=iproute2)
if [[ ${1:-} == engines ]]; then
    programs+=(sshd=openssh-server ssh=openssh-client etcd=etcd-server prometheus=prometheus promtool=prometheus)
fi
if [[ ${1:-} == long ]]; then
    programs+=(chromium=chromium)
fi
missing=()
for program in "${programs[@]}"; do
    PATH="$PATH:/usr/sbin:/sbin" command -v "${program%=*}" >/dev/null || missing+=("${program#*=}")
done

if ((${#missing[@]} == 0)); then
    exit 0
fi
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
    echo "== tests that need ${missing[*]} will be skipped: installing these takes root and apt-get"
    exit 0
fi
echo "== installing for the tests: ${missing[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    tail -n 20 "$log"
    echo "== tests that need ${missing[*]} will be skipped: apt-get could not install them (see above)"
fi
