"""AutoRound: packed like GPTQ or AWQ, with its own config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import CheckpointError
from penstock.models.reading import read, read_size, unusable
from penstock.weights.formats import awq, gptq
from penstock.weights.formats.parts import Format, check_fields, check_values

PACKINGS = ("auto_round:auto_gptq", "auto_round:auto_awq")
OWN = ("bits", "group_size", "sym")
FIELDS = (
    *(
        *OWN,
        "quant_method",
        "packing_format",
        "extra_config",
        "data_type",
        "block_name_to_quantize",
    ),
    *(
        "autoround_version",
        "iters",
        "nsamples",
        "seqlen",
        "batch_size",
        "lr",
        "minmax_lr",
        "scale_dtype",
    ),
    *(
        "gradient_accumulate_steps",
        "low_gpu_mem_usage",
        "enable_quanted_input",
        "enable_minmax_tuning",
    ),
    *(
        "amp",
        "backend",
        "dataset",
        "not_use_best_mse",
        "dynamic_max_gap",
        "to_quant_block_names",
        "seed",
    ),
    *(
        "super_bits",
        "enable_norm_bias_tuning",
        "model_free",
        "enable_alg_ext",
        "act_bits",
        "supported_types",
    ),
)
UNQUANTIZED_BITS = 16


def read_config(config: Mapping[str, Any]) -> Format:
    check_fields("auto-round", config, FIELDS)
    check_values("auto-round", config, {"data_type": ("int",), "act_bits": (UNQUANTIZED_BITS, 32)})
    packing = read(config, "packing_format", str)
    if packing not in PACKINGS:
        raise unusable("packing_format", packing, f"one of {', '.join(PACKINGS)}")
    exceptions = _read_exceptions(read(config, "extra_config", dict, {}))
    own = {key: config[key] for key in OWN if key in config}
    if packing == "auto_round:auto_gptq":
        return gptq.read_config({**own, "dynamic": exceptions})
    if exceptions:
        raise CheckpointError(
            f"extra_config of auto-round sets other bits for {', '.join([*exceptions][:5])}",
            "Modules packed as AWQ always have 4 bits.",
            "Use a checkpoint that is packed as auto_round:auto_gptq.",
        )
    return awq.read_config({**own, "zero_point": not read(config, "sym", bool, False)})


def _read_exceptions(modules: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Bits and group sizes of single modules, like `dynamic` of GPTQ; unquantized ones have no
    parts.
    """
    exceptions = {}
    for module, settings in modules.items():
        if not isinstance(settings, dict):
            raise unusable(f"extra_config of {module}", settings, "an object")
        own = {
            key: settings[key] for key in ("bits", "group_size") if settings.get(key) is not None
        }
        if own and read_size({"bits": 1, **own}, "bits") < UNQUANTIZED_BITS:
            exceptions[f"+:{module}$"] = own
    return exceptions
