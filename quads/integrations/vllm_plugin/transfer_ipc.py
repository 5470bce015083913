"""vLLM's CUDA IPC weight transport as one transaction."""

from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

from quads.integrations.vllm_plugin.transfer import Transactional


class Transfer(Transactional, IPCWeightTransferEngine):
    """See `Transactional`."""
