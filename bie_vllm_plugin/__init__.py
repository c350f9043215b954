# SPDX-License-Identifier: Apache-2.0
"""`int4_asym`: a 4-bit KV cache for vLLM.

`register` is the entry point of the group `vllm.general_plugins`; vLLM calls it
in every process. Nothing here imports vLLM or touches a GPU at import time.
"""
from __future__ import annotations

import logging
import sys

__version__ = "0.1.0"

_state: dict[str, str | bool] = {"registered": False}


def register() -> None:
    """Register the dtype, the cache specs and the backend with vLLM; safe to call often.

    Users of other dtypes never notice: whatever goes wrong here is logged, at warning
    level only for somebody who asked for `int4_asym` on the command line, and vLLM
    then refuses the dtype.
    """
    if _state["registered"]:
        return
    _state["registered"] = True
    from bie_vllm_plugin import vllm_compat

    try:
        vllm_compat.install()
    except vllm_compat.INSTALL_ERRORS as error:
        wanted = any("int4_asym" in argument for argument in sys.argv)
        vllm_compat.logger.log(
            logging.WARNING if wanted else logging.INFO,
            "int4_asym is not available with vLLM %s (supported: %s): %s. Install a supported vLLM or serve with "
            "another --kv-cache-dtype.",
            vllm_compat.vllm_version(),
            ", ".join(vllm_compat.SUPPORTED_VERSIONS),
            error,
        )
