"""The model card: model, intended use, data, training, evaluation, costs, privacy and record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from osfl.core.headline import NAMES, SMOKE, headline_of, is_smoke
from osfl.core.result import DIGESTS, Result, finding_line, suspicion_lines
from osfl.reports.audit import audit_sentences
from osfl.reports.columns import POOLED
from osfl.reports.differential_privacy import privacy_sentences
from osfl.reports.markdown import code, safe, table
from osfl.reports.rendering import fact_rows, write_text
from osfl.reports.score_sections import LABEL_HEAD, label_metrics, label_rows
from osfl.reports.text import count, decimal, flops, judged_on, many, percent, seconds, size
from osfl.reports.tokens import attack_sentences


def write_model_card(result: Result, folder: Path) -> Path:
    """Write `folder/model_card.md`."""
    parts = (_model, _use, _data, _training, _evaluation, _costs, _privacy, _deviations, _record)
    return write_text(folder / "model_card.md", "\n".join(part(result) for part in parts))


def _bullets(lines: list[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)


def _dataset(result: Result) -> str:
    return str(result["data"].get("dataset", result["task"].get("name", "unnamed data")))


def _model(result: Result) -> str:
    classes, image = result["task"]["classes"], " × ".join(str(side) for side in result["task"]["image"])
    several = "labels" in result["scores"]
    kind = "one model for each client" if result["scores"]["personalized"] else "one model for all clients"
    lines = [
        f"Made with the method {code(result['method'])} of OSFL, preset {code(result['preset'])}, seed {result['seed']}.",
        f"{kind.capitalize()}: an image of {image} (channels × height × width) goes in, "
        f"{'a probability for each' if several else 'one'} of {count(len(classes))} classes comes out.",
        f"Classes: {', '.join(safe(name) for name in classes)}.",
    ]
    banner = f"**{SMOKE}**\n\n" if is_smoke(result) else ""
    return f"# Model card: {safe(result['method'])} on {safe(_dataset(result))}\n\n{banner}{_bullets(lines)}"


def _use(result: Result) -> str:
    gives = "a probability for each of the classes above" if "labels" in result["scores"] else "one of the classes above"
    return (
        "## Intended use and limits\n\n"
        f"For research on one-shot federated learning. It gives {gives} for every input, also for "
        "images unlike those it was trained on, and its probabilities are only as good as the calibration error below. "
        "It has not been validated for clinical or other consequential decisions; that needs a study of its own on the "
        "population where it would be used. Look at the worst client and the per-class accuracies before trusting the mean.\n"
    )


def _data(result: Result) -> str:
    known = {key: value for key, value in result["data"].items() if value is not None}
    findings = known.pop("findings", ())
    facts = dict(fact_rows({"dataset": _dataset(result), **known}))
    license_name = facts.pop("license", None)
    lines = [f"{safe(key.replace('_', ' '))}: {safe(value)}" for key, value in facts.items()]
    lines.append(
        f"license: {safe(license_name)}"
        if license_name
        else "license: not recorded; ask the provider of the data before sharing the model"
    )
    if "inputs" in result:
        lines += [safe(line) for line in (*result["inputs"]["lines"], *result["inputs"]["cautions"])]
    rows = [[safe(row["client"]), count(row["train"]), count(row["val"])] for row in result["clients"]]
    noticed = _bullets([safe(finding_line(finding)) for finding in findings])
    found = f"\n### Findings about the data\n\n{noticed}" if findings else ""
    return f"## Data\n\n{_bullets(lines)}\n{table(['Client', 'Train', 'Validation'], rows)}{found}"


def _training(result: Result) -> str:
    messages = result["costs"]["messages_per_client"]
    sent = {0: "no client sent anything", 1: "each client sent exactly one message"}.get(
        messages, f"each client sent {count(messages)} messages (a multi-round reference)"
    )
    rows = [[code(key), code(value)] for key, value in fact_rows(result["settings"])]
    text = f"## Training\n\n{many(len(result['clients']), 'client').capitalize()} took part; {sent}.\n"
    suspected = _bullets([safe(line) for line in suspicion_lines(result)])
    text += f"\n{suspected}" if suspected else ""
    return text + (f"\n{table(['Setting', 'Value'], rows)}" if rows else "")


def _evaluation(result: Result) -> str:
    scores = result["scores"]
    metrics, own = scores["global"], scores["clients"]["own"]
    whose = "mean over the clients' own models" if scores["personalized"] else "the released model"
    constant = ["Accuracy of a constant answer", percent(scores["majority"])]
    rows = [
        ["Accuracy", percent(metrics["accuracy"])],
        ["Balanced accuracy", percent(metrics["balanced_accuracy"])],
        ["AUROC (macro, one against the rest)", decimal(metrics["auroc"])],
        ["F1 (macro)", decimal(metrics["f1"])],
        ["Expected calibration error", decimal(metrics["ece"])],
        ["Negative log-likelihood", decimal(metrics["nll"])],
        constant,
    ]
    if "labels" in scores:
        rows = [*([name, value] for name, value, _ in label_metrics(metrics)), constant]
    lines = [
        f"Own distribution, mean ± std over clients: {percent(own['mean'])} ± {percent(own['std'])}",
        f"Worst client: {safe(own['worst_client'])}, {percent(own['worst'])}",
    ]
    if weighed := scores["clients"].get("weighed"):
        lines.insert(1, f"Where each client weighs classes as it has them (`prior=site`): {percent(weighed['mean'])}")
    metric, why = headline_of(result)
    lines.append(f"Read {NAMES[metric]} first: {why}")
    classes = [[safe(name), percent(value)] for name, value in scores["per_class"].items()]
    by_class = table(["Class", "Accuracy"], classes)
    if "labels" in scores:
        intro = "Thresholds are those of the highest F1 on validation images of the clients."
        by_class = f"{intro}\n\n{table(LABEL_HEAD, [[safe(name), *row] for name, *row in label_rows(scores)])}"
    return (
        f"## Evaluation\n\nOn the {judged_on(result['data'])}, {whose}:\n\n{table(['Score', 'Value'], rows)}\n"
        f"{_bullets(lines)}\n"
        f"### By class\n\n{by_class}"
    )


def _costs(result: Result) -> str:
    costs = result["costs"]
    lines = [
        f"Uploaded by all clients: {size(costs['upload_bytes'])} ({count(costs['upload_bytes'])} bytes)",
        f"Downloaded by all clients: {size(costs['download_bytes'])} ({count(costs['download_bytes'])} bytes)",
    ]
    if "inference_bytes" in costs:
        lines.append(
            f"Exchanged after the round, to answer together: {size(costs['inference_bytes'])} "
            f"({count(costs['inference_bytes'])} bytes)"
        )
    rows = [
        [safe(name), seconds(phase["seconds"]), flops(phase["flops"]), size(phase["peak_bytes"])]
        for name, phase in costs["phases"].items()
    ]
    return f"## Costs\n\n{_bullets(lines)}\n{table(['Phase', 'Time', 'Operations', 'Peak memory'], rows)}"


def _privacy(result: Result) -> str:
    if result["method"] == POOLED:
        text = "All images were pooled in one place: this model is a reference, and offers no privacy between the clients."
    elif result["costs"]["upload_bytes"] == 0:
        text = "Nothing was uploaded."
    else:
        text = (
            "No image left a client as a file. What was uploaded is what the method's contract allows (model weights, "
            "statistics or synthetic data), as listed in the signed bundles; such things can still reveal something about "
            "the images they were made from."
        )
    if "privacy" in result:
        text += " " + " ".join(safe(sentence) for sentence in privacy_sentences(result["privacy"]))
    for warning in result["generators"]["warnings"] if "generators" in result else ():
        text += f" **{safe(warning)}**"
    audits: object = result.get("audits")
    lines = [f"{safe(key)}: {safe(value)}" for key, value in fact_rows(audits)] if isinstance(audits, Mapping) else []
    if "audit" in result:
        lines += [safe(sentence) for sentence in audit_sentences(result["audit"])]
    if "reconstruction" in result:
        lines += [safe(sentence) for sentence in attack_sentences(result["reconstruction"])]
    if lines:
        return f"## Privacy\n\n{text} Audit results are lower bounds of what an attacker could find:\n\n{_bullets(lines)}"
    return f"## Privacy\n\n{text} No privacy audit was run on this model, so nothing is claimed about how much.\n"


def _deviations(result: Result) -> str:
    found = [safe(sentence) for sentence in result["deviations"]]
    return f"## Deviations from the paper\n\n{_bullets(found) if found else 'None recorded.' + chr(10)}"


def _record(result: Result) -> str:
    digests = [[key.replace("_", " "), code(result[key])] for key in DIGESTS if key in result]  # type: ignore[literal-required]
    rows = [[safe(key), safe(value)] for key, value in fact_rows(result["environment"])]
    return (
        f"## Record\n\nEqual digests mean equal bytes.\n\n{table(['What', 'SHA-256'], digests)}\n"
        f"{table(['Environment', 'Value'], rows) if rows else ''}\n"
        f"## How to use it\n\n```sh\nosfl predict --run DIR image.png\n```\n\n"
        f"`DIR` is the folder that holds this run. How it was made:\n\n```sh\n{_fenced(result['command'])}\n```\n"
    )


def _fenced(command: str) -> str:
    """A command that cannot end the block it stands in."""
    return command.replace("```", "` ` `")
