#!/usr/bin/env bash
# Installs the programs from Debian that some tests talk to: Slurm (a real one, with nodes on this host) and network namespaces;
# with the word `engines` also OpenSSH's server, etcd, Prometheus and Azurite (by npm), with the word `long` also a browser (300 MB).
# Only what is missing is installed, and only as root on a machine with apt-get; elsewhere those tests are skipped and say so.
set -euo pipefail

azurite=azurite@3.35.0  # the last one that runs on Debian 12's Node.js
programs=(slurmctld=slurmctld slurmd=slurmd srun=slurm-client munged=munge ip=iproute2)
if [[ ${1:-} == engines ]]; then
    programs+=(sshd=openssh-server ssh=openssh-client etcd=etcd-server prometheus=prometheus promtool=prometheus)
    command -v azurite-blob >/dev/null || programs+=(node=nodejs npm=npm)
fi
if [[ ${1:-} == long ]]; then
    programs+=(chromium=chromium)
fi
missing=()
for program in "${programs[@]}"; do
    PATH="$PATH:/usr/sbin:/sbin" command -v "${program%=*}" >/dev/null || missing+=("${program#*=}")
done

install_with_apt() {
    if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
        echo "== tests that need $* will be skipped: installing these takes root and apt-get"
        return
    fi
    echo "== installing for the tests: $*"
    export DEBIAN_FRONTEND=noninteractive
    if ! { apt-get update && apt-get install -y --no-install-recommends "$@"; } >"$log" 2>&1; then
        tail -n 20 "$log"
        echo "== tests that need $* will be skipped: apt-get could not install them (see above)"
    fi
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ((${#missing[@]} > 0)); then
    install_with_apt "${missing[@]}"
fi
if [[ ${1:-} == engines ]] && ! command -v azurite-blob >/dev/null; then
    echo "== installing for the tests: $azurite"
    if ! npm install --global --no-fund --no-audit "$azurite" >"$log" 2>&1; then
        tail -n 20 "$log"
        echo "== tests that need azurite-blob will be skipped: npm could not install it (see above)"
    fi
fi
