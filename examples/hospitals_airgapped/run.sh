#!/bin/sh
# Three hospitals and a coordinator, each in a folder of its own; usb/ is the only thing that is carried between them.
#
#     ./run.sh [FOLDER]        plays in FOLDER (default: play), which must not exist yet
set -eu

method=${METHOD:-fedavg}
play=${1:-play}
[ ! -e "$play" ] || { echo "$play exists: name another folder, or remove it." >&2; exit 2; }
mkdir -p "$play/usb" "$play/coordinator" "$play/north" "$play/south" "$play/west"
cd "$play"

step() { printf '\n== %s\n' "$*"; }
carry() { mkdir -p "$(dirname "$2")"; cp "$1" "$2"; }              # by hand, from one machine to another
at() { (cd "$1"; shift; "$@"); }                                    # a command on another machine
everywhere() { for site in north south west; do "$1" "$site" & pids="${pids:-} $!"; done
               for pid in $pids; do wait "$pid"; done; pids=; }     # the hospitals work at the same time

step "Coordinator: a plan that all have agreed on (and, because this is a play, images for three hospitals)"
at coordinator osfl new --method "$method" --dataset digits --clients north,south,west --partition dirichlet:0.5 --smoke \
    --samples 300 --open-sum --sites hospitals    # open: masked uploads (METHOD=onesum) have another digest than a simulation's
for site in north south west; do mv "coordinator/hospitals/$site" "$site/images"; done
at coordinator osfl keys server
carry coordinator/plan.toml usb/plan.toml
carry coordinator/server.pub usb/server.pub

step "Hospitals: take plan and server key, look at their own images, make a key"
join() {
    carry usb/plan.toml "$1/plan.toml"
    carry usb/server.pub "$1/server.pub"
    at "$1" osfl keys "$1" > "$1/keys.txt"
    carry "$1/$1.pub" "usb/$1.pub"
}
everywhere join
at north osfl check plan.toml --data images --client north

step "Coordinator: opens the round for these keys, and for no others"
for site in north south west; do carry "usb/$site.pub" "coordinator/public/$site.pub"; done
at coordinator osfl enroll plan.toml --server server.pub --keys public --out round

step "Hospitals: train, each on its own images, and put one signed file on the stick"
upload() {
    at "$1" osfl client plan.toml --client "$1" --data images --key "$1.key" --out "../usb/$1.safetensors" > "$1/client.txt" 2>&1
}
everywhere upload
tail -n 9 north/client.txt

step "Coordinator: receives what arrived; a copy that broke off is refused, and copied again"
head -c 20000 usb/west.safetensors > usb/broken.safetensors
at coordinator osfl receive round ../usb && { echo "a broken copy was accepted" >&2; exit 1; }
rm usb/broken.safetensors
at coordinator osfl show round

step "Coordinator: the server phase, and the release on the stick"
at coordinator osfl server round --key server.key
carry coordinator/round/release.safetensors usb/release.safetensors
for part in coordinator/round/personal/*.safetensors; do
    [ ! -e "$part" ] || carry "$part" "usb/personal/$(basename "$part")"
done

step "Hospitals: verify the release, make it their own model, ask it about an image"
personalize() {
    carry usb/release.safetensors "$1/release.safetensors"
    own=
    if [ -e "usb/personal/$1.safetensors" ]; then
        carry "usb/personal/$1.safetensors" "$1/personal.safetensors"
        own="--personal personal.safetensors"
    fi
    at "$1" osfl personalize plan.toml --client "$1" --release release.safetensors $own --server server.pub --data images \
        --out model > "$1/personalize.txt" 2>&1
}
everywhere personalize
cat north/personalize.txt
image=$(cd north && find images -name '*.png' | sort | head -n 1)
at north osfl predict --run model "$image"

step "Anybody: is this release what it says, and made of these uploads?"
at coordinator osfl verify --round round | tail -n 5

step "Would one process with all images have come to the same release? (only a play can ask)"
mkdir hospitals
for site in north south west; do cp -r "$site/images" "hospitals/$site"; done
osfl run --plan coordinator/plan.toml --sites hospitals --out rehearsal --format json > rehearsal.json 2> rehearsal.txt
digest() { sed -n "s/^ *\"$1\": \"\([0-9a-f]*\)\".*/\1/p"; }
here=$(at coordinator osfl show round --format json | digest release)
there=$(digest release_digest < rehearsal.json)
[ -n "$here" ] && [ "$here" = "$there" ] || { echo "digests differ: $here, $there" >&2; exit 1; }

bytes=$(wc -c < usb/north.safetensors | tr -d ' ')
printf '\nShown: 3 hospitals and a coordinator shared nothing but files on usb/; the north sent %s bytes once, a broken copy was refused, and release %.12s is bit for bit that of a simulation.\n' "$bytes" "$here"
