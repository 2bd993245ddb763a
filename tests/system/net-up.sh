#!/usr/bin/env bash
# HOSTS virtual hosts with slow links on this machine: net-up.sh NAME HOSTS RATE [BURST], e.g. net-up.sh trial 4 100mbit
# Host i is the network namespace NAME-i with the address 10.77.0.i; each link is shaped to RATE both ways. The switch
# is a namespace too, NAME-0 with 10.77.0.254, so that this machine's own network stays as it is: launch from there.
# TCP is reno's, which fills such a link; with bbr, the default of some, it is idle at times when flows share it.
# Needs root and iproute2; net-down.sh NAME HOSTS takes everything away again.
set -euo pipefail
name=${1:?name} hosts=${2:?number of hosts} rate=${3:?rate, e.g. 100mbit} burst=${4:-256kb}

shape() { ip netns exec "$1" tc qdisc replace dev "$2" root tbf rate "$rate" burst "$burst" latency 100ms; }

ip netns add "$name-0"
ip -n "$name-0" link set lo up
ip -n "$name-0" link add switch type bridge
ip -n "$name-0" addr add 10.77.0.254/24 dev switch
ip -n "$name-0" link set switch up
for i in $(seq "$hosts"); do
  ip netns add "$name-$i"
  ip -n "$name-0" link add "port$i" type veth peer name eth0 netns "$name-$i"
  ip -n "$name-0" link set "port$i" master switch up
  ip -n "$name-$i" addr add "10.77.0.$i/24" dev eth0
  ip -n "$name-$i" link set eth0 up
  ip -n "$name-$i" link set lo up
  ip netns exec "$name-$i" sysctl -qw net.ipv4.tcp_congestion_control=reno net.ipv4.tcp_slow_start_after_idle=0
  shape "$name-$i" eth0
  shape "$name-0" "port$i"
done
