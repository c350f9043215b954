# SPDX-License-Identifier: Apache-2.0
"""`int4_asym`: a 4-bit KV cache for vLLM.

`register` is the entry point of the group `vllm.general_plugins`; vLLM calls it
in every process. Nothing here imports vLLM or touches a GPU at import time.
"""
from __future__ import annotations

import logging

__version__ = "0.1.0"

_state: dict[str, str | bool] = {"registered": False}


def register() -> None:
    """Register the dtype, the cache specs and the backend with vLLM; safe to call often.

    Users of other dtypes never notice: whatever goes wrong here is kept and raised
    as one sentence when somebody asks for `int4_asym`.
    """
    if _state["registered"]:
        return
    _state["registered"] = True
    from bie_vllm_plugin import vllm_compat

    try:
        vllm_compat.install()
    except vllm_compat.INSTALL_ERRORS as error:
        # Not a warning: this engine may serve another dtype and must stay undisturbed.
        logging.getLogger("vllm.bie_vllm_plugin").info("int4_asym is not available: %s", error)
