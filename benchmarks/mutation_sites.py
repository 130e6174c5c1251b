"""Which lines are mutated, and how: one operator, number, condition, call or argument at a time, by `ast`."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

# Functions with losses, updates and samplers of the methods and of the ingredients they use; "*": all of the file.
TARGETS: dict[str, str] = {
    "ingredients/distillation/order.py": "*",
    "ingredients/distillation/student.py": "kd_loss distill _keep_statistics _steps",
    "ingredients/distillation/token_relabel.py": "relabel_terms weighted gradient_norms _norm lipschitz label_weights "
    "PatchServer.learn PatchServer.release PatchServer.dream PatchServer._dream PatchServer.ask PatchServer.combined "
    "PatchServer._study PatchServer._step PatchServer._probe",
    "ingredients/ensembles/ensemble.py": "weights_for combine _combine _shares _voted _mix _only",
    "ingredients/ensembles/odds.py": "*",
    "ingredients/generators/synthesis.py": "draw_labels masked_divergence moved synthesize generator_loss Workshop.grow "
    "Workshop.turn "
    "Workshop.study Workshop._lesson Pair.draw Pair.improve_generator Pair.improve_student",
    "ingredients/inversion/pixels.py": "total_variation _Variation disagreement _Statistics _moments _WatchedNorm Watched "
    "invert _moved labels_for",
    "ingredients/inversion/sparse.py": "most_attended dropped pixels_of Move draw_move Pyramid stretching invert_sparsely "
    "_loss Joint",
    "ingredients/inversion/trajectories.py": "record adapted in_batch_mode noise_adapted lesson Learner _at _statistics",
    "ingredients/statistics/averaging.py": "*",
    "ingredients/statistics/class_counts.py": "shares",
    "ingredients/statistics/claimed_counts.py": "capped capped_sites capped_counts whole_counts drawn_for",
    "ingredients/statistics/gaussians.py": "*",
    "ingredients/statistics/kmeans.py": "kmeans _squares _spread_out _descend _reseed",
    "ingredients/statistics/shrinkage.py": "*",
    "ingredients/statistics/simplex.py": "*",
    "ingredients/statistics/site_prior.py": "site_log_prior corrected_prior PriorCorrected",
    "ingredients/statistics/support.py": "*",
    "ingredients/tokens/training.py": "fit_classifier train_on_tokens train_epoch linear_head",
    "ingredients/training/local.py": "fit step batches _steps draw_noise draw_changes changed _shifted _optimizer decay",
    "ingredients/training/multi_round.py": "MultiRound._one_round MultiRound._local mean_model",
    "methods/coboosting.py": "CoBoosting.objective hard_samples perturbed vote weight_step Voices",
    "methods/dafl.py": "entropy_term Featured Game.play Game.turn Game.objective",
    "methods/deepinversion.py": "DeepInversion._images DeepInversion._batch DeepInversion._teach",
    "methods/dense.py": "Dense.objective",
    "methods/falcon/__init__.py": "Falcon._teacher Falcon._wanted Falcon._generated Falcon._space Falcon.server_phase",
    "methods/falcon/distillation.py": "*",
    "methods/falcon/generator.py": "*",
    "methods/falcon/token_space.py": "*",
    "methods/fedbicross/__init__.py": "FedBiCross._clusters FedBiCross._split FedBiCross._follow FedBiCross._bilevel_step "
    "FedBiCross._fine_tune FedBiCross._personal_loss _entropies",
    "methods/fedbicross/bilevel.py": "*",
    "methods/fedbicross/clustering.py": "*",
    "methods/fedcgs.py": "FedCGS.server_phase FedCGS._statistics FedCGS._linear _Mapped.mapped",
    "methods/feddyn.py": "FedDyn.adjust FedDyn.after FedDyn.merge",
    "methods/federated_factory/__init__.py": "FederatedFactory._wanted FederatedFactory.personalize FederatedFactory._pool",
    "methods/federated_factory/autoencoders.py": "Vae.fit Vae.sample vae_loss",
    "methods/federated_factory/cells.py": "quotas believed",
    "methods/federated_factory/diffusion.py": "Diffusion.fit Diffusion.sample Diffusion._pad Diffusion._cut diffusion_loss "
    "diffusion_step draw_noise moments batch_for learning_rate ema_exponent ema_beta follow time_grid heun _levels",
    "methods/federated_factory/experts.py": "*",
    "methods/federated_factory/mixtures.py": "Mixture.fit Mixture.sample supported_mixture _mixture _log_densities",
    "methods/federated_factory/symmetries.py": "*",
    "methods/fedftg.py": "shares diversity Tuning",
    "methods/fedisca.py": "FedISCA._train_along",
    "methods/fedpft.py": "FedPFT._wanted FedPFT._drawn FedPFT.mixture",
    "methods/fedprox.py": "FedProx.adjust",
    "methods/fol/__init__.py": "Candidates Fol._weigh Fol._taught Fol._begin Fol._lessons blended",
    "methods/fol/alignment.py": "shared_layers likeness align penalties",
    "methods/fol/bounds.py": "*",
    "methods/fol/pruning.py": "*",
    "methods/fol/selection.py": "*",
    "methods/scaffold.py": "Scaffold.adjust Scaffold.after Scaffold.merge",
    "models/preconditioning.py": "*",
    "models/token_models.py": "levels_mask sinusoid _Block.forward TokenGenerator.hidden TokenGenerator.log_likelihood "
    "TokenGenerator._clamped TokenGenerator.sample TokenGenerator._drawn AttentionPool.forward AttentionPool.pooled",
}

# Their arguments and their absence change no model: operations that are counted, progress, what is shown, what is refused.
NOT_MATHEMATICS = {
    "spend",
    "progress",
    "show",
    "milestone",
    "check_finite",
    "_check_finite",
    "check_sane",
    "check_mode",
    "working_on",
}

_SWAPS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
}
_BOUNDARIES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
# x.clamp(...) -> x: calls that give back what they are called on, changed
_UNWRAPPED = (
    "abs clamp clamp_min clamp_max clamp_ detach exp flip half log log_softmax mean nan_to_num norm round softmax sort sqrt "
    "square sum eval train reset_running_stats"
)
# keywords whose absence is another computation, not a mistake in the call
_OPTIONAL = (
    "momentum weight_decay betas clip reduction mode align_corners schedule temperature soft hard noise mirror track after "
    "adjust perturb every replacement descending keepdim replicate log_target share combine each server student ask"
)
_GUARD = 1e-5  # smaller numbers keep denominators above zero; twice as much would change nothing


@dataclass(frozen=True)
class Mutant:
    """One change in one place."""

    file: str  # below src/osfl
    function: str
    line: int
    what: str  # the code before -> the code after
    place: int  # of the node, and of the change among those that it allows
    number: int

    @property
    def name(self) -> str:
        """Stays the same while the function does, wherever it stands in its file."""
        return f"{self.file}::{self.function}: {self.what}"


Change = tuple[str, Callable[[ast.AST], ast.AST]]  # what it does, and how; it may change the node in place


def mutants_of(text: str, file: str, functions: str = "*") -> list[Mutant]:
    """All mutants of these functions, in the order of the file."""
    found: list[Mutant] = []
    times: dict[str, int] = {}
    for place, (function, node) in enumerate(_nodes(ast.parse(text))):
        if not _wanted(function, functions):
            continue
        for number, (what, _) in enumerate(_changes(node)):
            mutant = Mutant(file, function, getattr(node, "lineno", 0), what, place, number)
            times[mutant.name] = count = times.get(mutant.name, 0) + 1  # equal changes of one function get numbers
            found.append(mutant if count == 1 else replace(mutant, what=f"{what} ({count})"))
    return found


def mutated(text: str, mutant: Mutant) -> str:
    """The whole file with that change."""
    tree = ast.parse(text)
    _, node = next(islice(_nodes(tree), mutant.place, None))
    _replace(tree, node, _changes(node)[mutant.number][1])
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _wanted(function: str, functions: str) -> bool:
    names = functions.split()
    return bool(function) and (names == ["*"] or any(function == name or function.startswith(f"{name}.") for name in names))


def _nodes(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Every node of a function's body with the function's name; no annotations, defaults, docstrings or messages."""

    def below(node: ast.AST, inside: str) -> Iterator[tuple[str, ast.AST]]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name = f"{inside}.{node.name}" if inside else node.name
            for part in node.body:
                yield from below(part, name)
            return
        if isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)) or _is_booked(node):
            return
        yield inside, node
        skipped = [node.annotation] if isinstance(node, ast.AnnAssign) else []
        for child in ast.iter_child_nodes(node):
            if child not in skipped:
                yield from below(child, inside)

    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield from below(node, "")


def _is_booked(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else node
    return isinstance(call, ast.Call) and _called(call) in NOT_MATHEMATICS


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _changes(node: ast.AST) -> list[Change]:
    """What can be done to this node alone."""
    found: list[Change] = []
    if isinstance(node, ast.BinOp) and type(node.op) in _SWAPS and not _is_text(node.left) and not _is_text(node.right):
        found.append(_change(node, lambda n: setattr(n, "op", _SWAPS[type(n.op)]())))  # type: ignore[attr-defined]
    if isinstance(node, ast.AugAssign) and type(node.op) in _SWAPS:
        found.append(_change(node, lambda n: setattr(n, "op", _SWAPS[type(n.op)]())))  # type: ignore[attr-defined]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        found.append((f"{_text(node)} -> {_text(node.operand)}", lambda n: n.operand))  # type: ignore[attr-defined]
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _BOUNDARIES:
        found.append(_change(node, lambda n: n.ops.__setitem__(0, _BOUNDARIES[type(n.ops[0])]())))  # type: ignore[attr-defined]
    if isinstance(node, ast.Constant) and type(node.value) in (int, float) and not 0 < node.value < _GUARD:  # type: ignore[operator]
        found.append(_change(node, lambda n: setattr(n, "value", _other(n.value))))  # type: ignore[attr-defined]
    if isinstance(node, (ast.If, ast.IfExp)):
        found.append(_negated(node))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        found.append((f"{_text(node)} -> pass", lambda n: ast.Pass()))
    if isinstance(node, ast.Call):
        found += _calls(node)
    return found


def _other(number: float) -> float:
    return number + 1 if isinstance(number, int) else 2 * number or 1.0


def _negated(node: ast.If | ast.IfExp) -> Change:
    def change(n: ast.AST) -> ast.AST:
        n.test = ast.UnaryOp(ast.Not(), n.test)  # type: ignore[attr-defined]
        return n

    return f"if {_text(node.test)} -> if not", change


def _calls(node: ast.Call) -> Iterator[Change]:
    name = _called(node)
    if (
        isinstance(node.func, ast.Attribute)
        and name in _UNWRAPPED.split()
        and not (name in ("eval", "train") and not node.args)
    ):
        yield f"{_text(node)} -> {_text(node.func.value)}", lambda n: n.func.value  # type: ignore[attr-defined]
    plain = [isinstance(part, (ast.Starred, ast.Constant)) for part in node.args[:2]]
    if len(plain) == 2 and not any(plain) and name not in ("zip", "isinstance", "getattr", "max", "min", "range", "allclose"):
        yield _change(node, lambda n: n.args.__setitem__(slice(0, 2), n.args[1::-1]))  # type: ignore[attr-defined]
    for place, keyword in enumerate(node.keywords):
        if keyword.arg in _OPTIONAL.split():
            yield _change(node, lambda n, place=place: n.keywords.pop(place))  # type: ignore[misc]


def _change(node: ast.AST, work: Callable[[ast.AST], object]) -> Change:
    after = copy.deepcopy(node)
    work(after)

    def change(n: ast.AST) -> ast.AST:
        work(n)
        return n

    return f"{_text(node)} -> {_text(after)}", change


def _replace(tree: ast.Module, target: ast.AST, change: Callable[[ast.AST], ast.AST]) -> None:
    class Only(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return change(node) if node is target else self.generic_visit(node)

    Only().visit(tree)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, (ast.List, ast.JoinedStr)) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _text(node: ast.AST) -> str:
    lines = ast.unparse(node).splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} ..."
