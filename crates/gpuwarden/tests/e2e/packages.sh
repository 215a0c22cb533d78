# Story of a machine with systemd: gpuwarden is installed, finds a fault, is killed, upgraded and
# purged. Each step prints what packages.rs expects; the test limits its time.

export NO_COLOR=1 SYSTEMD_COLORS=0 SYSTEMD_PAGER=cat

step() {
    printf '\n== %s\n' "$1"
}

# Waits until a command succeeds.
await() {
    until "$@" >/dev/null 2>&1; do
        sleep 0.5
    done
}

shows() {
    gpuwarden status | grep -q "$1"
}

pid() {
    systemctl show --property=MainPID --value "$1"
}

# Waits for another process of a service than the given one.
another() {
    await another_answers "$1" "$2"
    echo 'another process'
}

another_answers() {
    test "$(pid "$1")" != "$2" && shows gpuwarden
}

active() {
    systemctl is-active gpuwarden gpuwarden-agent
}

step installed
dpkg --install /root/gpuwarden.deb

step enabled
systemctl is-enabled gpuwarden gpuwarden-agent
active

step up
await shows 'auto: kmsg'
gpuwarden status

step doctor
gpuwarden doctor --config /etc/gpuwarden/gpuwarden.toml

step privileges
stat --format=%U "/proc/$(pid gpuwarden)"
grep CapEff "/proc/$(pid gpuwarden)/status"

step 'kernel log'
gpuwarden inject xid 79 --pci 0000:3b:00 --via kmsg
await shows 'SysLogsXIDError 79'
gpuwarden status

step socket
setpriv --reuid=nobody --regid=nogroup --clear-groups \
    gpuwarden inject xid 48 --pci 0000:3c:00 --socket /var/run/nvsentinel.sock \
    --node-name "$(hostname)"
await shows 'SysLogsXIDError 48'
gpuwarden status

step killed
before=$(pid gpuwarden)
kill -KILL "$before"
another gpuwarden "$before"
systemctl show --property=NRestarts gpuwarden
systemctl is-active gpuwarden

step 'after the kill'
gpuwarden status

step upgrade
echo "# This site's." >>/etc/gpuwarden/gpuwarden.toml
before=$(pid gpuwarden)
dpkg --force-confold --install /root/later.deb

step upgraded
another gpuwarden "$before"
dpkg-query --show --showformat '${Version}\n' gpuwarden
tail -n 1 /etc/gpuwarden/gpuwarden.toml
systemctl is-active gpuwarden

step 'after the upgrade'
gpuwarden status

step agent
echo 'controller = "http://127.0.0.1:50051"' >/etc/gpuwarden/agent.toml
systemctl --quiet disable --now gpuwarden
systemctl --quiet enable --now gpuwarden-agent
await shows gpuwarden
active

# What an upgrade runs after unpacking.
step 'agent upgraded'
before=$(pid gpuwarden-agent)
DPKG_MAINTSCRIPT_PACKAGE=gpuwarden /var/lib/dpkg/info/gpuwarden.postinst configure 0.1.0-1
another gpuwarden-agent "$before"
active

step purge
dpkg --purge gpuwarden

step purged
left=$(
    ls -d /etc/gpuwarden /var/lib/gpuwarden /var/lib/nvsentinel /run/gpuwarden /run/device-api \
        /run/nvsentinel.sock 2>/dev/null
    find /etc /usr /var/lib /run -name '*gpuwarden*' ! -path '/run/systemd/*' ! -path '/var/lib/dpkg/*'
    systemctl list-units --all --plain --no-legend 'gpuwarden*'
    getent passwd gpuwarden
)
echo "${left:-nothing left}"

step end
poweroff --force
