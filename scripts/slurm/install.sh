#!/usr/bin/env bash
# Slurm for the tests of make test-slurm (Debian and Ubuntu, as root); starts nothing. Fails where
# it cannot: who asks for these tests, as CI does, would not see that they were skipped.
set -euo pipefail
export PATH="$PATH:/usr/sbin"
has_slurm() {
    local program
    for program in slurmctld slurmd sbatch munged; do
        command -v "$program" >/dev/null || return 1
    done
}
has_slurm && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "no Slurm here; to install it takes root on Debian or Ubuntu: slurmctld slurmd munge" >&2
    exit 1
fi
# Packages of daemons start them, where something can.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
apt-get update -q
apt-get install -y -q --no-install-recommends slurmctld slurmd slurm-client munge
