#!/bin/sh
# A PostgreSQL server that lives for the tests and leaves nothing behind.
#
#   url=$(tests/postgres.sh start DIR)        # an empty DIR; the server listens on a free port of 127.0.0.1
#   LORASERVE_TEST_POSTGRES_URL=$url pytest …
#   tests/postgres.sh restart DIR             # the same server and data, with empty buffers
#   tests/postgres.sh stop DIR                # ends that server, by its own pid file, and removes DIR
#
# LORASERVE_TEST_POSTGRES_SETTINGS has more of the server's settings: "-c fsync=on".
#
# Needs Debian's `postgresql` package (its service needn't run). PostgreSQL refuses to run as root: root uses the user `postgres`.
set -eu

verb=${1:-} dir=${2:-}
if [ -z "$dir" ] || { [ "$verb" != start ] && [ "$verb" != restart ] && [ "$verb" != stop ]; }; then
    echo "usage: $0 start|restart|stop DIR" >&2
    exit 2
fi

bin=$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -V | tail -n 1)
if [ -z "$bin" ]; then
    echo "no PostgreSQL server found in /usr/lib/postgresql; try: apt-get install -y postgresql" >&2
    exit 1
fi

as_owner() {
    if [ "$(id -u)" = 0 ]; then runuser -u postgres -- "$@"; else "$@"; fi
}

case $verb in
start)
    mkdir -p "$dir"
    chmod 755 "$dir"
    if [ "$(id -u)" = 0 ]; then install -d -o postgres -g postgres -m 700 "$dir/data" "$dir/run"; else mkdir -p -m 700 "$dir/data" "$dir/run"; fi
    as_owner "$bin/initdb" -D "$dir/data" -U loraserve --auth=trust --no-sync --encoding=UTF8 --locale=C.UTF-8 >/dev/null
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    # No fsync: this server is for behaviour, not for durability.
    as_owner "$bin/pg_ctl" -D "$dir/data" -w -t 60 -l "$dir/run/log" -o "-c listen_addresses=127.0.0.1 -c port=$port -c unix_socket_directories=$dir/run -c fsync=off ${LORASERVE_TEST_POSTGRES_SETTINGS:-}" start >/dev/null
    echo "postgresql://loraserve@127.0.0.1:$port/postgres"
    ;;
restart)
    # with the settings of its start
    as_owner "$bin/pg_ctl" -D "$dir/data" -w -t 60 -l "$dir/run/log" restart >/dev/null
    ;;
stop)
    as_owner "$bin/pg_ctl" -D "$dir/data" -m immediate -w stop >/dev/null
    rm -rf "$dir"
    ;;
esac
