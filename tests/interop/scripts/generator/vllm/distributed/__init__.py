"""Like vLLM's package, where `StatelessProcessGroup` is in a module called `utils`."""

import sys

from vllm.distributed import stateless_group

sys.modules[f"{__name__}.utils"] = utils = stateless_group
