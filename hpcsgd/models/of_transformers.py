"""Models of the library `transformers`, built from a configuration, with random weights; no download.

The models keep their classes and the names of their weights, so that the library can read the trained model.
Only the output changes: it is the tensor of scores ("logits"), instead of an object with several results.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn

from hpcsgd.errors import UserError, in_section, near_miss
from hpcsgd.named import require_arguments

TYPE = "model_type"
OF_THEIR_VOCABULARY = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Arguments whose defaults fit only the vocabulary of the library's own model."""
_BUILDING = threading.Lock()
"""The lock for building models, because ranks may be threads.

Building changes torch's defaults, and two threads must not import the library at the same time.
"""


def of_transformers(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Return the model that the class `name` makes of a configuration with these `arguments`.

    `name` is "AutoModelForCausalLM", with the configuration's `model_type`, or a model's own class, such as
    "GPT2LMHeadModel". Raises `UserError` if the library is missing, it lacks the class, or the configuration
    lacks an argument.
    """
    with _BUILDING:
        library = _library()
        with in_section("model", "name"):
            kind = _class(library, name)
        with in_section("model.arguments"):
            config = _config(library, kind, arguments)
            make = getattr(kind, "from_config", None) or kind
            model = _reported(f"transformers:{name}", library, make, config)
    config.use_cache = False  # the cache helps only generation, token by token
    model.register_forward_hook(_scores)
    return model


def _library() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            '[model] name: needs the library `transformers`: pip install "hpcsgd[hf]"',
            key=("model", "name"),
        ) from error
    return transformers


def _class(library: Any, name: str) -> Any:
    kind = getattr(library, name, None)
    if isinstance(kind, type) and (hasattr(kind, "from_config") or issubclass(kind, library.PreTrainedModel)):
        return kind
    common = [name for name in dir(library) if name.startswith("AutoModel")]
    raise UserError(f"no model {name!r} in transformers; {near_miss(name, common)}, or a model's own class")


def _config(library: Any, kind: Any, arguments: Mapping[str, Any]) -> Any:
    if issubclass(kind, library.PreTrainedModel):
        config_class, own = kind.config_class, dict(arguments)
    else:
        own = dict(arguments)
        config_class = _config_class(library, own.pop(TYPE, None))
    require_arguments(config_class, own)
    bare = _reported(config_class.__name__, library, config_class)
    unknown = {key: None for key in OF_THEIR_VOCABULARY if hasattr(bare, key)}
    return _reported(config_class.__name__, library, config_class, **{**unknown, **own})


def _config_class(library: Any, model_type: Any) -> Any:
    types = library.CONFIG_MAPPING
    if model_type in types:
        return types[model_type]
    near = get_close_matches(str(model_type), list(types), n=3, cutoff=0.4) or ["gpt2", "llama"]
    given = f"{TYPE} is missing" if model_type is None else f"no {TYPE} {model_type!r} in transformers"
    raise UserError(f"{given}; allowed is what the library knows, such as {', '.join(near)}")


def _reported(name: str, library: Any, make: Any, *values: Any, **arguments: Any) -> Any:
    """Return the result of `make`. An exception of the library is raised as a one-line `UserError`."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        return make(*values, **arguments)
    except (TypeError, ValueError, StrictDataclassError) as error:
        first = str(error).strip().splitlines()
        raise UserError(f"{name}: {' '.join(' '.join(first[:2]).split())}") from error


def _scores(model: nn.Module, _: Any, output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if found is None:
        raise UserError(
            f"[model]: {type(model).__name__} gives no scores: take a class with a head for them",
            key=("model",),
        )
    return found
