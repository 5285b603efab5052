"""Makes a model of transformers whose weights are still the bytes of their files."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import fnmatch
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.huggingface_folder import FOLDER
from paceline.errors import CheckpointError, PlanError
from paceline.hub.joined_copy import are_joined, joined_copy
from paceline.hub.mapped_files import mapped
from paceline.hub.model_copy import CopyKind
from paceline.hub.model_folder import cache_folder, model_folder, model_parts, source_name
from paceline.hub.opened_files import reading_opened
from paceline.hub.quantised import ACTIVATIONS, dequantised_copy, find_quantisation, kept_quantised
from paceline.hub.stored_weights import StoredWeights, stored_weights
from paceline.hub.weight_types import convert_buffers, final_types, restore_precise, widest
from paceline.parallel.absent_tensors import as_absent, come
from paceline.parallel.class_name import own_class
from paceline.parallel.part_dtype import mark

__all__ = ["from_pretrained"]

TYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}
NUM_LISTED = 5
NONE: Mapping[str, Any] = {}
TAKEN = {  # options of transformers that would put weights elsewhere, with the remedy
    "device_map": "worker.prepare moves each worker's part to its device",
    "tp_plan": "name the layout in the plan: paceline.run(train, plan='tensor=2')",
    "quantization_config": "the folder's configuration says how its weights are; dequantize=True dequantises them",
    "torch_dtype": "its name is dtype=",
    "load_in_8bit": "quantise the model once by transformers, save_pretrained(folder), and name that folder",
    "load_in_4bit": "quantise the model once by transformers, save_pretrained(folder), and name that folder",
    "low_cpu_mem_usage": "no worker has room for all of the model in any case",
    "state_dict": "call model.load_state_dict(weights, assign=True) on the model",
    "from_tf": "only safetensors files can be read in parts",
    "from_flax": "only safetensors files can be read in parts",
    "output_loading_info": "names that differ are an error",
    "ignore_mismatched_sizes": "name tensors that the model shall begin anew: new=['score.*']",
    "local_files_only": "nothing is asked of a hub",
}


def from_pretrained(
    source: str | Path,
    model_class: type[Any] | None = None,
    *,
    dtype: torch.dtype | str = "auto",
    dequantize: bool = False,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    new: Sequence[str] = (),
    unused: Sequence[str] = (),
    **options: Any,
) -> Any:
    """Return a model of transformers with the weights of safetensors files, of which no tensor has been read yet.

    `worker.prepare` of it then reads, on each worker, the rows, layers or experts that the worker keeps. Workers of one
    host share what is read, and send each other no weights.

    source: a folder as `save_pretrained` writes it; a hub's id, such as `"meta-llama/Llama-3.1-8B"`, whose files are in
    the hub's cache on this disk (nothing is downloaded from hubs); or a folder's address in object storage
    (`s3://bucket/folder`), which each host copies once to `cache_dir` (default: `PACELINE_CACHE`, or
    `~/.cache/paceline`). Where layouts split models on the CPU, only what its workers keep comes, at `worker.prepare`;
    weights that a script looks at before come then.

    model_class: a class of transformers with `from_pretrained`; default: `AutoModelForCausalLM`.

    dtype: the type that the model's floating weights get, such as `torch.float32` or `"bf16"`. `"auto"`: that of the
    files, or of most of their bytes. Where it is another one, `worker.prepare` converts each worker's part, one tensor
    at a time; until then the model has the files' types. What transformers keeps in 32 bits for a class stays so.

    dequantize: whether files that are quantised become weights of that type: transformers makes one dequantised copy on
    each host, in `cache_dir`. Without it only those of bitsandbytes are read: they stay quantised, as the frozen base
    of adapters. It has no effect on ordinary files.

    new: patterns of names (`"score.*"`) of weights that the files lack, and that the model begins anew. unused: those
    of weights in the files for which the model has no place. options: further ones of transformers, such as
    `attn_implementation`.

    Raises CheckpointError that names each other weight that is on one side only or of another shape, a file that is
    absent or cut short, and an id that the cache does not have; PlanError for quantised files without `dequantize`, or
    that cannot be dequantised here, and for options that would put weights elsewhere. Both say what to do.

    Example::

        def train(worker):
            model = worker.prepare(paceline.from_pretrained("folder", dtype="fp32"))
            optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-5))
    """
    wanted = _dtype_of(dtype)
    for name, remedy in TAKEN.items():
        if name in options:
            raise PlanError(f"paceline.from_pretrained(..., {name}=...) is not possible: {remedy}.")
    chosen = _class(model_class)
    parts = model_parts(source, revision=revision, cache_dir=cache_dir)
    folder = parts.folder if parts is not None else model_folder(source, revision=revision, cache_dir=cache_dir)

    def whole() -> StoredWeights:
        return stored_weights(model_folder(source, revision=revision, cache_dir=cache_dir))

    quantised = find_quantisation(folder)
    stored = (parts.weights() if parts is not None and quantised is None else None) or whole()
    if quantised is None and stored.opened is None:
        stored = mapped(stored)
    empty = _empty(folder, chosen, options, wanted)
    kind = CopyKind(own_class(empty), unused=unused, options=options)

    def load(stored: StoredWeights, dtype: torch.dtype, more: Mapping[str, Any] = NONE) -> _Loaded:
        return _loaded(stored, chosen, dtype, new=new, unused=unused, options={**options, **more})

    if quantised is not None:
        options, unused = quantised.options(options), (*unused, *ACTIVATIONS)
        dtype = wanted or quantised.dtype(stored)

        def types_of(model: Any) -> Mapping[str, torch.dtype]:
            return final_types(model, empty, dtype)

        if not dequantize:
            kept = kept_quantised(stored, quantised, load, None if wanted is None else types_of)
            return _named(_in_type(kept, wanted), source)
        size = sum(one.numel() for one in empty.state_dict().values())
        cache = cache_folder(cache_dir)
        made = dequantised_copy(stored, cache, kind, quantised, dtype, num_elements=size, load=load, types_of=types_of)
        options = quantised.plain_options(options)
        return _named(load(stored_weights(made), dtype).model, source)
    own = stored.dtype
    if are_joined(empty, stored):
        joined = joined_copy(whole(), cache_folder(cache_dir), kind, lambda given: _precise(given, load))
        stored = mapped(stored_weights(joined))
    if wanted is None:
        return _named(_asking(load(stored, own).model), source)
    model = _asking(_precise(stored, load, lambda model: final_types(model, empty, wanted)).model)
    types = final_types(model, empty, wanted)
    convert_buffers(model, types)
    mark(model, types)
    return _named(_in_type(model, wanted), source)


def _named(model: Any, source: str | Path) -> Any:
    """The model, whose configuration says where it comes from, as the script says it: adapters name their base by it.
    The folder with its files on this host may be in a cache."""
    if getattr(model, "config", None) is not None:
        vars(model)[FOLDER] = str(getattr(model.config, "name_or_path", "") or "")
        model.config.name_or_path = model.name_or_path = source_name(source)
    return model


def _in_type(model: Any, wanted: torch.dtype | None) -> Any:
    """The model, whose configuration says the type that its weights get."""
    if wanted is not None and getattr(model, "config", None) is not None:
        model.config.dtype = wanted
    return model


def _precise(
    stored: StoredWeights,
    load: Callable[[StoredWeights, torch.dtype], _Loaded],
    types_of: Callable[[Any], Mapping[str, torch.dtype]] | None = None,
) -> _Loaded:
    """The model with weights as precise as the files have them, or, given the types that they get, as these need."""
    found = load(stored, stored.dtype)
    types = None if types_of is None else types_of(found.model)
    if not restore_precise(found.model, stored, types, found.left):
        return found
    del found  # some has become part of other tensors: all of it is loaded as numbers that none of it exceeds
    return load(stored, widest(stored))


def _empty(folder: Path, model_class: Any, options: Mapping[str, Any], dtype: torch.dtype | None) -> Any:
    """The model without numbers, which takes no memory, in this type or in the configuration's."""
    transformers: Any = importlib.import_module("transformers")
    own = {name: options[name] for name in ("config", "trust_remote_code") if name in options}
    config = copy.deepcopy(own.pop("config", None)) or transformers.AutoConfig.from_pretrained(folder, **own)
    if dtype is not None and (hasattr(model_class, "from_config") or hasattr(model_class, "_from_config")):
        own["dtype"] = dtype
    with torch.device("meta"):
        if hasattr(model_class, "from_config"):
            return model_class.from_config(config, **own)
        return model_class._from_config(config, dtype=dtype) if "dtype" in own else model_class(config)


@dataclasses.dataclass(frozen=True, slots=True)
class _Loaded:
    """What transformers has made of files."""

    model: Any
    begun: set[str]  # names in the model of weights that it began anew
    left: set[str]  # names in the files of those without a place


def _loaded(
    stored: StoredWeights,
    model_class: Any,
    dtype: torch.dtype,
    *,
    new: Sequence[str],
    unused: Sequence[str],
    options: Mapping[str, Any],
) -> _Loaded:
    """Have transformers make the model. In the type of the file it copies nothing: its tensors are the mapped file."""
    with _quiet(), reading_opened(stored):
        model, told = model_class.from_pretrained(
            stored.folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # these names are among what it told, and an error below
            **options,
        )
    problems = [
        *_listed("not in the files", told["missing_keys"], new, "new"),
        *_listed("in the files, without a place in the model", told["unexpected_keys"], unused, "unused"),
        *_listed("of another shape in the files", map(_name, told["mismatched_keys"]), new, "new"),
        *map(str, told.get("error_msgs") or ()),
    ]
    if problems:
        shown = "\n  ".join(problems)
        raise CheckpointError(
            f"the weights of {stored.folder} do not fit {type(model).__name__}:\n  {shown}\nName the class that they "
            "were saved from (paceline.from_pretrained(folder, Class)), or say which weights begin anew (new=[...]) or "
            "are left out (unused=[...])"
        )
    begun = {*told["missing_keys"], *map(_name, told["mismatched_keys"])}
    return _Loaded(model, begun, {*told["unexpected_keys"], *map(_name, told["mismatched_keys"])})


def _asking(model: Any) -> Any:
    """Have weights that have not come yet ask for their bytes when somebody looks at them; buffers, which are small and
    whole on each worker, do so now."""
    for one in model.parameters():
        as_absent(one)
    come([as_absent(one) for one in model.buffers()])
    return model


def _listed(what: str, names: Any, allowed: Sequence[str], option: str) -> list[str]:
    found = sorted(name for name in names if not any(fnmatch.fnmatchcase(name, one) for one in allowed))
    rows = [f"{name}: {what}" for name in found[:NUM_LISTED]]
    return [*rows, f"and {len(found) - NUM_LISTED} more ({option}=)"] if len(found) > NUM_LISTED else rows


def _name(mismatched: Any) -> str:
    return mismatched if isinstance(mismatched, str) else str(mismatched[0])


def _class(given: Any) -> Any:
    if importlib.util.find_spec("transformers") is None:
        raise PlanError("paceline.from_pretrained needs the package transformers: pip install transformers.")
    if given is None:
        return importlib.import_module("transformers").AutoModelForCausalLM
    if not callable(getattr(given, "from_pretrained", None)):
        name = getattr(given, "__name__", type(given).__name__)
        raise TypeError(
            f"paceline.from_pretrained(source, {name}): a class of transformers is needed, such as "
            "AutoModelForSequenceClassification. For a model of your own make it on the meta device, and "
            "model.load_state_dict(load_file(path), assign=True)"
        )
    return given


def _dtype_of(given: torch.dtype | str) -> torch.dtype | None:
    found = TYPES.get(given.removeprefix("torch.")) if isinstance(given, str) else given
    if given == "auto":
        return None
    if found not in TYPES.values():
        raise PlanError(f"dtype is {given!r}; it must be 'auto', float32, bfloat16 or float16.")
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No bar of progress for what takes no time, and no report of what is an error here; as before afterwards."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()
