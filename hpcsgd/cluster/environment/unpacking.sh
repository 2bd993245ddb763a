#!/bin/sh
# A Python environment in one file, by `hpcsgd job pack`: ./FILE -m hpcsgd train job.toml, in place of its Python.
# The first start on a node unpacks the tar archive that follows these lines, by one sequential read of this file. Other
# starts wait for that, or use what has been unpacked.
set -eu
trap '' USR1 # Slurm's warning signal may come before Python handles it
case $0 in /*) pack=$0 ;; *) pack=$PWD/$0 ;; esac
die() { echo "hpcsgd: $pack: $*" >&2; exit 1; }

ours="@LOCAL@/hpcsgd-$(id -u)" # of this user only: others could put programs there, which we would run
mkdir -m 700 "$ours" 2>/dev/null || { [ ! -L "$ours" ] && [ "$(stat -c %u "$ours")" = "$(id -u)" ]; } ||
  die "$ours: cannot be made, or another's"
there=$ours/@NAME@ part=$ours/@NAME@.part

unpack() {
  rm -rf "$part" # left by a start that was killed
  mkdir "$part"
  { dd bs=@HEADER@ count=1 of=/dev/null 2>/dev/null && tar -x --no-same-owner -b 2048 -C "$part" -f -; } <"$pack" || return 1
  [ -L "$part/bin/python" ] || return 1 # the last file of the archive
  printf 'home = %s/base/bin\ninclude-system-site-packages = @SYSTEM@\nversion = @VERSION@\n' "$there" >"$part/pyvenv.cfg"
  echo "$pack" >"$part/@ORIGIN@"
  mv "$part" "$there"
}

if [ ! -d "$there" ]; then
  (
    flock 9 || exit 1
    [ -d "$there" ] || unpack || { rm -rf "$part"; exit 1; }
  ) 9>"$there.lock" || die "cannot be unpacked to $there: not whole, or no room"
fi
@LIBRARIES@
exec "$there/bin/python" "$@"
