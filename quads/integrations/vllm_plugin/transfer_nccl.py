"""vLLM's NCCL weight transport as one transaction."""

from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from quads.integrations.vllm_plugin.transfer import Transactional


class Transfer(Transactional, NCCLWeightTransferEngine):
    """See `Transactional`."""
