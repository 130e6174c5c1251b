"""results.json: everything one run found out, with every key explained. Reports are pure functions of it.

The schema carries a version. Adding a key keeps it; renaming, removing or changing the meaning of one raises it.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import NotRequired, TypedDict

from osfl.core.errors import RoundError
from osfl.core.types import Json

SCHEMA = 1
DIGESTS = (
    "plan_digest",
    "release_digest",
    "content_digest",
    "models_digest",
)  # of a result, in the order in which pages show them


class Metrics(TypedDict):
    """How good one classifier is on one set of images; a mean over clients where each client has its own model."""

    accuracy: float  # share of right answers
    balanced_accuracy: float  # mean of the per-class accuracies over the classes present
    auroc: float | None  # macro one-vs-rest; None when fewer than two classes are present
    f1: float  # macro, over the classes present
    ece: float  # expected calibration error, 15 equal-width bins
    nll: float  # mean negative log-likelihood
    # multi-label: all of the above by class, one yes or no each, then their mean over the classes; and beside them
    ap: NotRequired[float | None]  # average precision, mean over the classes that some images have
    auroc_micro: NotRequired[float | None]  # over all pairs of image and class at once
    ap_micro: NotRequired[float | None]
    f1_micro: NotRequired[float]


class Spread(TypedDict):
    """One number a client."""

    mean: float
    std: float  # population standard deviation over clients
    median: NotRequired[float]  # absent in results of earlier versions
    worst: float
    worst_client: str
    values: dict[str, float]  # client -> value


class LabelScores(TypedDict):
    """Multi-label: one class, yes or no. A mean over clients where each has its own model; None: all images alike."""

    images: int  # of the test set that show it
    threshold: float  # on the probability; where F1 is highest on validation images, 0.5 where none shows the class
    auroc: float | None
    ap: float | None
    f1: float | None
    sensitivity: float | None  # share of the images that show it which are found
    specificity: float | None  # share of the others which are left alone


class ClientScores(TypedDict):
    own: Spread  # accuracy on the client's own distribution: per-class accuracy weighted by its class shares, exact;
    # where clients are domains, on the test images of that domain
    everyone: Spread  # accuracy on the global test set
    # one release for all that sites may weigh: own accuracy where each weighs classes as it has them, by counting alone
    weighed: NotRequired[Spread]


Scores = TypedDict(
    "Scores",
    {
        "global": Metrics,  # on the global test set
        "clients": ClientScores,
        "personalized": bool,  # True: each client has a model of its own and `global` is the mean over them
        "majority": float,  # share of the most frequent class in the test set: what a constant answer reaches
        "per_class": dict[str, float | None],  # accuracy by class; None where the test set lacks the class
        "confusion": list[list[float]],  # rows = truth, columns = answer; counts (mean over clients if personalized)
        "labels": NotRequired[dict[str, LabelScores]],  # multi-label only; `confusion` is empty then, `per_class` sensitivity
    },
)


class Phase(TypedDict):
    seconds: float  # by the wall clock, summed over clients; with more workers than free cores, waiting counts too
    flops: float  # floating point operations by torch's counter (1 multiply-add = 2), of training and synthesis
    peak_bytes: int  # high-water mark of resident memory while the phase ran, whole process


class Generated(TypedDict):
    samples: int  # synthetic images or features, over all phases
    flops: float  # of making them: sampling a generator, or the optimization that ends in images


class Costs(TypedDict):
    upload_bytes: int  # all clients, as measured on the bundles
    download_bytes: int  # all clients: each one's release bundle(s)
    upload_bytes_by_client: dict[str, int]
    download_bytes_by_client: dict[str, int]
    messages_per_client: int  # 1 for a one-shot method, the number of rounds for a multi-round reference, 0 for none
    client_seconds: float  # all clients, before the upload and after the release: phases client + personalize
    server_seconds: float  # = phases.server.seconds
    wall_seconds: float  # from command to report in this process, without what earlier, interrupted processes spent
    phases: dict[str, Phase]  # client, server, personalize, evaluate
    generated: NotRequired[Generated]  # only for methods that make samples
    inference_bytes: NotRequired[int]  # after the round: each client's model to all others, where they answer together


class Encounter(TypedDict):
    """One of several encounters: a round of its own, whose models are where clients start in the next one."""

    encounter: int  # 1, 2, ...
    plan_digest: str
    release_digest: str
    models_digest: str
    accuracy: float  # on the global test set
    own: Spread  # as scores.clients.own
    everyone: Spread  # as scores.clients.everyone
    upload_bytes: int
    download_bytes: int


class Gains(TypedDict):
    """What taking part was worth to each client: own-distribution accuracy over that of local training only."""

    over: str  # what it is compared with: local_only, and how its training differs if it does
    mean: float  # over clients, in shares of accuracy
    median: float
    worst: float
    worst_client: str
    share: float  # of clients that gain
    share_that_loses: float
    everyone: float  # the same difference on the global test set, mean over clients
    values: dict[str, float]  # client -> gain


class Inputs(TypedDict):
    """What networks got to see of the images (see osfl.models.input_facts)."""

    native: int  # median side of the files, in pixels; 0: not known
    opened: int  # side of the images that everybody had
    network: int  # side that a frozen encoder resizes them to, or that published weights were trained at; 0: as opened
    pixels: str  # symmetric ([-1, 1]) or imagenet, for networks with published weights; else empty
    lines: list[str]  # the same as sentences
    cautions: list[str]  # what costs accuracy, and what to do


class Finding(TypedDict):
    """Something wrong or unusual about the data, for all files that it concerns."""

    what: str  # the reason, in the same words for each file
    done: str  # what was done about it
    count: int  # of files, classes or sites
    examples: list[str]  # the first of them


def suspicion_lines(result: Result) -> list[str]:
    """Sites whose uploads contradict the others', a sentence each."""
    return [
        f"Suspected before the release: {one['client']} {one['text']} ({one['rule']}). In a real round the coordinator decides."
        for one in result.get("suspicions", ())
    ]


def finding_line(finding: Finding) -> str:
    """`damaged: 12 × left out (a.png, b.png, c.png, …)`"""
    if finding["examples"] == ["(all)"]:
        return f"{finding['what']}; {finding['done']}"
    more = ", …" if finding["count"] > len(finding["examples"]) else ""
    return f"{finding['what']}: {finding['count']:,} × {finding['done']} ({', '.join(finding['examples'])}{more})"


class ClientRow(TypedDict):
    client: str
    train: int  # images it trains on
    val: int  # images it keeps for validation
    class_counts: list[int]  # by class, train and validation together


class ClassOfImages(TypedDict):
    """Synthetic images of one class beside real ones. Distances are in `Generators.space`; None: too few images for it."""

    synthetic: int  # images in the pool
    training: int  # real images of all clients that generators were trained on
    held_out: int  # real images that nobody was trained on
    compared: int  # of each kind, drawn at random, in the two distances below: the same number, so the floor is fair
    frechet: float | None  # Fréchet distance of synthetic and training images; too large when `compared` is small
    frechet_floor: float | None  # the same between held-out and training images: what a perfect generator would get
    kernel: float | None  # unbiased kernel distance of synthetic and training images; around 0 for a perfect generator
    kernel_floor: float | None  # the same between held-out and training images
    nearest_ratio: float | None  # median distance to the nearest training image, synthetic over held-out, on thumbnails
    copied: float | None  # share of synthetic images that count as copies (see evaluation/privacy/memorization.py)
    copied_floor: float | None  # share of held-out images that would count as copies by the same rule
    verdict: str  # copies, no sign of copying, too few to say
    error: float | None  # estimated KL(real ‖ synthetic) in nats, Gaussians on principal components of the space


class Bound(TypedDict):
    """Excess risk that generators of this error can cause at most, after 2M √(½ Σ π ε); an estimate where ε is one."""

    value: float | None  # for the 0-1 loss, M = 1: in shares of accuracy; 1 and more is vacuous; None: none can be given
    error: float | None  # Σ π ε in nats, π = share of each class among the real training images
    prior_shift: float | None  # KL of the shares of classes, real ‖ synthetic; not in `value`, 0 if the pool is as unbalanced
    dimensions: int  # principal components that ε was estimated on
    left_out: list[str]  # classes with too few images to estimate ε; the others' shares are scaled up
    infinite: list[str]  # classes without synthetic images, or with always the same one: then there is no bound


class Generators(TypedDict):
    """What synthetic images are worth, from methods that show theirs; in simulations only, for it takes real images."""

    space: str  # the features in which images are compared; figures of different spaces do not compare
    frechet_name: str  # FID on Inception features, FD on any other
    kernel_name: str  # KID on Inception features, KD on any other
    overall: ClassOfImages  # over the classes that have images of every kind; no verdict of its own
    classes: dict[str, ClassOfImages]
    clients: dict[str, float | None]  # estimated KL of the client's own images from the pool, mean over its classes
    bound: Bound
    warnings: list[str]  # a sentence each, for a reader who looks at nothing else
    figures: dict[str, Json]  # pictures, by figure kind (see reports)


class ClassOfTokens(TypedDict):
    """Synthetic features of one class beside real ones. None: too few of them."""

    synthetic: int  # feature sequences in the pool
    training: int  # real images of all clients that generators were trained on
    held_out: int  # real images that nobody was trained on
    compared: int  # of each kind, drawn at random: the same number, so the floor is fair
    mmd: float | None  # squared maximum mean discrepancy of synthetic and training features; around 0: the same distribution
    mmd_floor: float | None  # the same between held-out and training features: what a perfect generator would get


class Tokens(TypedDict):
    """What synthetic features are worth, from methods that show theirs (`tokens`); in simulations only."""

    shape: list[int]  # of one image's features: 1 + L tokens of d numbers, or one vector
    squared_width: float  # of the kernel exp(-|x - y|² / it): the median over pairs of training features, all in one vector
    overall: ClassOfTokens  # over the classes that have features of every kind, as many of each
    classes: dict[str, ClassOfTokens]


class Reconstructed(TypedDict):
    """Images that an attacker made, against training images; means over `count` of them."""

    count: int
    psnr: float  # peak signal-to-noise ratio in dB: higher is more alike
    ssim: float  # structural similarity: 1 is the same image


class Attacker(TypedDict):
    images: int  # that it has, to learn how features become images
    real: Reconstructed  # from features of training images, each against its own image
    real_best: Reconstructed  # the same, each against the training image of the class that it is nearest to
    synthetic: Reconstructed  # from synthetic features, against the nearest training image of the class
    blind: Reconstructed  # the mean of the attacker's images of the class instead: what is found without features
    # the other way round, as in FALCON's Table 5: for each training image the highest PSNR and the highest SSIM of all
    real_by_original: NotRequired[Reconstructed]
    synthetic_by_original: NotRequired[Reconstructed]


class Reconstruction(TypedDict):
    """What attackers made of features (`osfl audit`; see evaluation/privacy). A lower bound: others may do better."""

    side: int  # of the images that were compared, in pixels
    steps: int  # of each attacker's training
    decoder: NotRequired[int]  # version of our decoder; figures of an earlier one are weaker
    attackers: dict[str, Attacker]  # by what they have
    figures: dict[str, Json]


class Rate(TypedDict):
    """A share or an area, with its 95 % interval."""

    value: float
    low: float
    high: float


class Membership(TypedDict):
    """One membership attack: who was in the training data? Members and non-members are as many of each class."""

    party: str  # who can try it: server (an upload), peers (a bundle), outsider (the release)
    of: str  # whose images: a client, or all
    attack: str  # loss, confidence, nearness, span, leverage; lira and rmia compare with shadows
    signal: str  # what the attack starts from
    members: int
    others: int
    auc: Rate
    tpr: dict[str, Rate | None]  # by false positive rate; None: too few non-members for so small a rate
    exceeds_bound: NotRequired[bool]  # in rounds with [privacy]: surely more than (epsilon, delta) allows, a mistake of ours


class Canaries(TypedDict):
    """Is the audit able to see? Mislabeled images, planted into one client phase more, and others that were never planted."""

    client: str
    signal: str
    planted: int
    found: int  # planted ones above the threshold that 1 % of never-planted ones exceed
    false_alarms: Rate  # never-planted ones above it, of another half than the threshold is from
    found_unplanted: int  # of the same canaries, by the same threshold, in the round as it was: false alarms, too


class Rebuilt(TypedDict):
    """Images that were made from one client's upload, beside its own and held-out ones."""

    party: str
    of: str
    how: str  # model inversion, samples
    images: int  # that were made
    by_original: Reconstructed  # for each training image the highest PSNR and SSIM of all that was made of its class
    by_reconstruction: Reconstructed  # for each that was made the nearest training image of its class
    blind: Reconstructed  # as by_original, with the mean held-out image of the class: what is found without the upload
    ratio: float  # median distance to the nearest training image over that to the nearest of as many held-out ones


class Readout(TypedDict):
    """What the egress check's attack (osfl.rounds.exposure) reads out of an upload: the least ratio of each kind."""

    of: str
    what: str  # component, mean, direction, sample, row of second moments, ...
    ratio: float  # 0 is a copy of a training image, 1 no nearer to one than to others


class Shares(TypedDict):
    """Attribute inference: a client's share of each class. Distances are total variation: 0 is exact, 1 as wrong as can be."""

    of: str
    how: str  # sent in the clear or with noise, answers, batch norm statistics
    distance: float
    blind: float  # of the guess that all classes are alike


class Presence(TypedDict):
    """Is this site's data in the round? Told from so many of its images and the released model."""

    of: str
    images: int
    auc: float  # the chance that such a set of members looks more familiar than one of non-members


class Audit(TypedDict):
    """What `osfl audit` tried, and what it found: lower bounds of what can be learned (see evaluation/privacy)."""

    shadows: int  # rounds that were repeated with other images
    population: str  # who the non-members are, and what the attacker knows
    replayed: bool | None  # whether the upload can be made again bit by bit from its images, the plan and its seed
    membership: list[Membership]
    canaries: list[Canaries]
    rebuilt: list[Rebuilt]
    readout: list[Readout]
    shares: list[Shares]
    presence: list[Presence]
    verdict: list[str]  # a sentence for each party
    not_shown: list[str]  # what was not tried, or cannot be told, a sentence each


class Course(TypedDict):
    """Scores of the server's intermediate models; in simulations only, for it takes test images."""

    unit: str  # server epoch, or round of a multi-round reference
    at: list[int]  # after how many of them
    accuracy: list[float]  # share of right answers then, on the images that the scores are on


class DifferentialPrivacy(TypedDict):
    """What holds for one image of one site, computed from the noise and the number of uploads that the release was made of."""

    epsilon: float | None  # against `adversary`; None: so large that it says nothing
    delta: float
    adversary: str
    epsilon_release: float | None  # against those who see the release alone
    epsilon_term: float | None  # against those who see one site's upload: the server, unless it gets the total alone
    epsilon_site: NotRequired[float | None]  # sums: against another site with the release, which knows its own noise
    unit: str  # what is hidden
    noise: str  # site: each site added all of it; share: the sites' noise adds up to it
    sites: int  # uploads in the release
    colluders: NotRequired[int]  # sums: sites that may tell others their noise without making epsilon untrue
    secure_sum: NotRequired[bool]  # sums: the server saw masked uploads and their total
    noised: list[str]
    repeatable: bool  # False: noise is drawn anew, and others who repeat the round get other digests


class Result(TypedDict):
    schema: int
    method: str
    preset: str  # paper, cpu, smoke
    seed: int
    command: str  # repeats this run
    plan_digest: str  # the round's name
    release_digest: str  # of the release manifest: equal digests mean equal bytes
    content_digest: NotRequired[
        str
    ]  # of the release's tensors and facts alone, without plan and uploads; absent in earlier results
    models_digest: str  # of all final models, after personalization
    task: dict[str, Json]  # name, classes, image
    data: dict[str, Json]  # dataset, digest, partition, groups, samples, test_samples, evaluated_on, train_images, ...
    clients: list[ClientRow]
    settings: dict[str, Json]  # every setting of the method, resolved
    deviations: list[str]  # where this run departs from the paper, a sentence each
    scores: Scores
    costs: Costs
    environment: dict[
        str, Json
    ]  # versions, device, precision, workers, threads, processor; notes: what went otherwise, and why
    inputs: NotRequired[Inputs]  # absent in results of earlier versions
    figures: NotRequired[dict[str, Json]]  # what a method wants shown, by figure kind (see reports)
    course: NotRequired[Course]  # only for methods whose server learns step by step, and for many rounds
    generators: NotRequired[Generators]  # only for methods that offer `samples`
    gains: NotRequired[Gains]  # only where a run of local_only on the same shards stands beside this one
    topology: NotRequired[dict[str, Json]]  # topology and encounters, where the plan has them
    encounters: NotRequired[list[Encounter]]  # where clients exchange several times; `costs` are then those of all encounters
    tokens: NotRequired[Tokens]  # only for methods that offer `tokens`
    code: NotRequired[str]  # digest of the method's files and what they import; absent in results of earlier versions
    privacy: NotRequired[DifferentialPrivacy]  # only for rounds with [privacy] in their plan
    suspicions: NotRequired[list[dict[str, Json]]]  # only for rehearsals of a plan: client, rule, text, value, bound
    reconstruction: NotRequired[Reconstruction]  # only where `osfl audit` attacked the run
    audit: NotRequired[Audit]  # only where `osfl audit` attacked the run


def write_json(path: Path, value: Mapping[str, Json]) -> None:
    """Whole or not at all: results.json marks a round as complete. If a power cut takes it back, it is made again."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(text.encode("utf-8", errors="replace"))  # a file may be named in bytes that are no text
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise
    finally:
        temporary.unlink(missing_ok=True)


def read_result(path: Path) -> Result:
    """Read a results.json (or the folder that holds one), or say plainly why not."""
    path = path / "results.json" if path.is_dir() else path
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RoundError(f"there is no results.json in {path.parent}", fix="Run `osfl run --out DIR` first.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RoundError(f"{path} is not valid JSON: {error}", fix="Delete it and run the same command again.") from None
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        got = value.get("schema") if isinstance(value, dict) else type(value).__name__
        raise RoundError(
            f"{path} has another results schema",
            field="schema",
            expected=SCHEMA,
            got=got,
            fix="Repeat the run with this version of osfl.",
        )
    return value  # type: ignore[return-value]
