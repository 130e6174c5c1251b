#!/bin/sh
# Three sites and a coordinator over Flower, as separate processes on this machine, with TLS and node authentication.
#
#     ./run.sh [FOLDER]        plays in FOLDER (default: play), which must not exist yet
set -eu

method=${METHOD:-fedavg}
play=${1:-play}
[ ! -e "$play" ] || { echo "$play exists: name another folder, or remove it." >&2; exit 2; }
mkdir -p "$play/coordinator" "$play/north" "$play/south" "$play/west"
cd "$play"
play=$PWD

step() { printf '\n== %s\n' "$*"; }
at() { (cd "$1"; shift; "$@"); }                                    # a command on another machine
started=
start() { setsid "$@" & started="$started $!"; }                    # a machine's program, always on
stop() { for group in $started; do kill -KILL "-$group" 2> /dev/null || true; done; }
trap stop EXIT
trap 'exit 1' INT TERM
port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

step "Coordinator: a plan that all have agreed on (and, because this is a play, images for three sites)"
at coordinator osfl new --method "$method" --dataset digits --clients north,south,west --partition dirichlet:0.5 --smoke \
    --samples 300 --open-sum --sites images    # open: masked uploads (METHOD=onesum) have another digest than a simulation's
for site in north south west; do mv "coordinator/images/$site" "$site/images"; done

step "Sites: each makes a key of its own and hands its public half to the coordinator"
mkdir coordinator/public
for site in north south west; do
    at "$site" osfl keys "$site" > /dev/null
    cp "$site/$site.pub" coordinator/public/
done

step "Coordinator: writes what each machine needs"
at coordinator osfl deploy plan.toml --keys public --out deployed --host 127.0.0.1 --port "$(port)"
for site in north south west; do
    mv "coordinator/deployed/sites/$site" "$site/node"              # carried to the site
    cp "$site/$site.key" "$site/node/site.key"                      # the site adds its own private key
done

step "Coordinator: the SuperLink, and the round, which ends when every site has the release"
OSFL_INNER=$(port); export OSFL_INNER
start coordinator/deployed/coordinator/start.sh > link.txt 2>&1
start timeout "${OSFL_PATIENCE:-900}" coordinator/deployed/coordinator/run.sh < /dev/null > run.txt 2>&1
round=$!
failed() { tail -n 40 run.txt link.txt north.txt >&2; exit 1; }
registered() { find coordinator/deployed/coordinator/link -name 'registered-*' 2> /dev/null | wc -l; }
until [ "$(registered)" -eq 3 ]; do kill -0 "$round" 2> /dev/null || failed; sleep 0.5; done   # nodes that come earlier try again

step "Sites: three SuperNodes"
for site in north south west; do
    OSFL_NODE_PORT=$(port) start "$site/node/start.sh" "$site/images" > "$site.txt" 2>&1
done
wait "$round" || failed
grep '^\[osfl\]' run.txt
stop; started=

step "Site: its model, and what it thinks of an image"
model=$(dirname "$(find north/node/work -name model.safetensors)")
osfl predict --run "$model" "$(find north/images -name '*.png' | sort | head -n 1)"

step "Would one process with all images have come to the same release? (only a play can ask)"
mkdir images
for site in north south west; do cp -r "$site/images" "images/$site"; done
osfl run --plan coordinator/plan.toml --sites images --out rehearsal --format json > rehearsal.json 2> rehearsal.txt
digest() { sed -n "s/^ *\"$1\": \"\([0-9a-f]*\)\".*/\1/p"; }
place=$(echo coordinator/deployed/coordinator/rounds/*)
here=$(osfl show "$place" --format json | digest release)
there=$(digest release_digest < rehearsal.json)
[ -n "$here" ] && [ "$here" = "$there" ] || { echo "digests differ: $here, $there" >&2; exit 1; }

bytes=$(wc -c < "$place/inbox/north.safetensors" | tr -d ' ')
printf '\nShown: 3 sites and a coordinator exchanged messages over Flower with TLS and registered keys; the north sent %s bytes once, every site has a verified model, and release %.12s is bit for bit that of a simulation.\n' "$bytes" "$here"
