# Runs a script where it can do no harm, and prints the records of the commands that it would have run.
# $1: a private folder; $2: a memory limit in kB; $3: a time limit in seconds; the rest: the command.
# The caller made user, PID, mount, network, IPC and UTS namespaces, and wrote `tools`, `recorded`, `recorder`, `setup`.
set -eu
PATH=$PATH:/usr/sbin:/sbin
private=$1 limit_kb=$2 limit_s=$3
shift 3
root=$private/root space=$private/space
mount --make-rprivate /
mount -t tmpfs -o size=64m,mode=755 none "$space"
mkdir -p "$space/bin" "$space/records" "$space/tmp"
mapfile -t tools < "$private/tools"
mapfile -t paths < <(type -P "${tools[@]}")
cp -L "${paths[@]}" "$space/bin"
recorder=$(< "$private/recorder")
while read -r name; do
    printf '%s\n' "$recorder" > "$space/bin/$name"
done < "$private/recorded"
cp "$private/setup" "$private/recorder" "$space"
chmod 755 "$space"/bin/* "$space/recorder"
# Folders of `/` that are not there can be made: in memory.
mount -t tmpfs -o size=64m,mode=755,noexec,nosuid none "$root"
for place in /*; do
    if [ -L "$place" ]; then
        cp -P "$place" "$root"
    elif [ -d "$place" ]; then
        mkdir "$root$place" && mount --rbind "$place" "$root$place"
    fi
done
# What is there is read-only, and nothing on it can be executed except shared libraries.
awk -v root="$root/" 'index($5, root) == 1 { print $5 }' /proc/self/mountinfo | sort -r | while read -r place; do
    mount -o remount,bind,ro,noexec,nosuid "$place" 2> /dev/null || mount -t tmpfs -o ro none "$place" 2> /dev/null || true
done
for place in /usr/lib /usr/lib64 /lib64; do
    if [ -d "$place" ] && [ ! -L "$place" ]; then
        mount --bind "$place" "$root$place"
        mount -o remount,bind,ro,nosuid "$root$place"
    fi
done
for place in /usr/sbin /usr/local/bin /usr/local/sbin /run /dev; do
    if [ -d "$root$place" ] && [ ! -L "$root$place" ]; then mount -t tmpfs -o size=1m none "$root$place"; fi
done
for device in null zero urandom; do
    touch "$root/dev/$device" && mount --bind "/dev/$device" "$root/dev/$device"
done
mount -t proc -o ro proc "$root/proc" 2> /dev/null || mount -t tmpfs -o ro none "$root/proc"
# What the script writes is gone afterwards: layers over its folders, which it may fill.
number=0
for place in /tmp "${HOME:-/tmp}" "$PWD"; do
    number=$((number + 1))
    mkdir -p "$space/upper$number" "$space/work$number"
    mount -t overlay -o "noexec,nosuid,lowerdir=$place,upperdir=$space/upper$number,workdir=$space/work$number" none \
        "$root$place" 2> /dev/null || true
done
mount --bind "$space/bin" "$root/usr/bin"
mount -o remount,bind,ro,nosuid "$root/usr/bin"
mount --bind "$space" "$root/mnt"
(
    ulimit -v "$limit_kb" -f 65536 -c 0 -n 256
    exec timeout -k 1 "$limit_s" chroot "$root" /usr/bin/setpriv --bounding-set=-all --inh-caps=-all --no-new-privs \
        /usr/bin/env TRIMTAB_RECORDS=/mnt/records BASH_ENV=/mnt/setup TMPDIR=/mnt/tmp PATH=/usr/bin \
        /usr/bin/bash -c 'cd "$1" && shift && exec "$@"' bash "$PWD" "$@"
) < /dev/null > /dev/null 2>&1 || true
find "$space/records" -type f | sort | head -n 1000 | while read -r record; do cat "$record"; done | head -c 50000000
