# The first process of a VM (see namespaces.py). Arguments: the folders to hide, `--`, and the folders of the host's
# /tmp and /dev/shm to carry over into the VM's own. Its standard input is a pipe that only the daemon holds the other
# end of, so the VM ends when the daemon does, however it ends; while it reads, bash reaps every orphan.
set -eu

mount -t proc proc /proc
hostname "$VM_NAME"

mount -t tmpfs -o mode=755 tmpfs /mnt
# The kernel is the host's, but each boot of a VM has an id of its own.
cat /proc/sys/kernel/random/uuid > /mnt/boot_id
mount --bind /mnt/boot_id /proc/sys/kernel/random/boot_id
sed "s#^\([^:]*:[^:]*:$(id -u):[^:]*:[^:]*\):[^:]*:.*#\1:$VM_HOME:/bin/bash#" /etc/passwd > /mnt/passwd
chmod 644 /mnt/passwd
mount --bind /mnt/passwd /etc/passwd

while [ "$1" != -- ]; do
  # A folder may be erased between the look at what there is and this mount.
  mount -t tmpfs -o ro,mode=555 tmpfs "$1" || [ ! -d "$1" ]
  shift
done
shift

number=0
for kept in "$@"; do
  number=$((number + 1))
  mkdir -p "/mnt/kept/$number"
  mount --rbind "$kept" "/mnt/kept/$number"
done
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o "mode=1777$VM_SHM_SIZE" tmpfs /dev/shm
number=0
for kept in "$@"; do
  number=$((number + 1))
  mkdir -p "$kept"
  mount --move "/mnt/kept/$number" "$kept"
done

cd /
echo ready
exec > /dev/null
read -r _ || true
