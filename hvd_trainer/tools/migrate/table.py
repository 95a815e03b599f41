"""The table of rules: what each call of Horovod becomes, why, and which test shows it.

`docs/migrate.md` is made from it, and a call whose row is missing is left as it is. In `result` and `lines`:

    dist        torch.distributed, by the name that the file has for it
    {x}         a variable: what the result is assigned to, or a new one
    {tensor}    an argument, by its name in `signature`; {tensor:name} is one that is a variable by then
    {copy}      a copy of the tensor, which is left out if nothing else refers to it
    {op}        `, op=dist.ReduceOp.MAX` and the like; nothing for a sum
    {divided}   ` /= dist.get_world_size()` for an average; the line is left out for others
"""

from __future__ import annotations

from dataclasses import dataclass

SIZE, OBJECTS = "dist.get_world_size()", "{x} = [None] * dist.get_world_size()"
SUM, AVERAGE = "dist.all_reduce({x}{op})", "{x}{divided}"
REDUCED = "tensor average name compression op"


@dataclass(frozen=True)
class Rule:
    """One row: calls of Horovod, and what they become."""

    names: str
    """of the calls, apart by blanks"""
    result: str
    """the expression that stands for the call; of a `special` rule in words"""
    why: str
    test: str
    """a case of tests/unit/tools/test_migrate.py, which fails without this row"""
    lines: tuple[str, ...] = ()
    """statements before the one with the call"""
    signature: str = ""
    """names of the arguments, in their order"""
    special: bool = False
    """whether it takes more than a template: done by `Rewriter.rule_NAME`, or before it"""
    shows: str = ""
    """what differs first, in the words of `parity`, where this rule changes numbers"""


RULES = (
    Rule(
        "init",
        "dist.init_process_group()",
        "Without a backend it takes Gloo for CPU tensors and NCCL for GPU tensors, as Horovod does.",
        "init",
        special=True,
    ),
    Rule("rank", "dist.get_rank()", "The number of this process among all.", "world"),
    Rule("size", SIZE, "The number of processes.", "world", shows="learning rate"),
    Rule("local_rank", 'int(os.environ["LOCAL_RANK"])', "torchrun tells it by a variable.", "world"),
    Rule("local_size", 'int(os.environ["LOCAL_WORLD_SIZE"])', "torchrun tells it by a variable.", "world"),
    Rule("cross_rank", 'int(os.environ["GROUP_RANK"])', "The number of the node.", "world"),
    Rule(
        "cross_size",
        f'{SIZE} // int(os.environ["LOCAL_WORLD_SIZE"])',
        "The number of nodes; torchrun starts equally many processes on each.",
        "world",
    ),
    Rule("is_initialized", "dist.is_initialized()", "The same.", "world"),
    Rule("nccl_built", "dist.is_nccl_available()", "What PyTorch was built with.", "world"),
    Rule("gloo_built", "dist.is_gloo_available()", "What PyTorch was built with.", "world"),
    Rule("mpi_built", "dist.is_mpi_available()", "What PyTorch was built with.", "world"),
    Rule(
        "shutdown",
        "dist.destroy_process_group()",
        "A script without it gets one at its end: threads of Gloo and NCCL end before Python does.",
        "shutdown",
        special=True,
    ),
    Rule(
        "DistributedOptimizer",
        "ddp_model = DDP(model, broadcast_buffers=False), and the optimizer as it is",
        "Forward calls of the training go through `ddp_model`; `model` keeps its name for `state_dict`, so that "
        "old checkpoints load. Each rank keeps its own batch-norm statistics, as under Horovod. Every parameter "
        "must take part in each backward pass, else DDP says so (`find_unused_parameters=True`).",
        "optimizer",
        special=True,
        shows="gradients",
    ),
    Rule(
        "broadcast_parameters",
        "the place of DDP(...), which sends rank 0's weights; dist.broadcast of each tensor elsewhere",
        "DDP broadcasts parameters and buffers when it wraps a model.",
        "broadcast parameters",
        special=True,
        shows="parameters",
    ),
    Rule(
        "broadcast_optimizer_state",
        "nothing; after a load dist.broadcast_object_list of its state",
        "A new optimizer has no state to send. Horovod makes some up by a step with gradients of zero, after "
        "which Adam's first step is 0.744 of what it should be, and weight decay has moved the weights: now it is "
        "right.",
        "optimizer state",
        special=True,
        shows="optimizer",
    ),
    Rule(
        "backward_passes_per_step",
        "with ddp_model.no_sync(): in all passes but the last",
        "Gradients of the passes add up, and only the ranks are averaged: neither divides by the passes.",
        "passes in a loop",
        special=True,
        shows="gradients",
    ),
    Rule(
        "op",
        "ddp_model.register_comm_hook(None, sum_gradients)",
        "DDP averages; a hook sums.",
        "sum of gradients",
        special=True,
        shows="gradients",
    ),
    Rule(
        "gradient_predivide_factor",
        "ddp_model.register_comm_hook(factor, average_gradients)",
        "Divided by the factor before the sum, and by the rest of the world size after it.",
        "predivide",
        special=True,
        shows="gradients",
    ),
    Rule(
        "compression",
        "ddp_model.register_comm_hook(None, fp16_compress_wrapper(average_gradients)), or bf16_compress_hook",
        "PyTorch's fp16_compress_hook divides before the sum, which loses small gradients in fp16 that Horovod "
        "keeps; in bf16 nothing is lost.",
        "compression",
        special=True,
        shows="gradients",
    ),
    Rule(
        "synchronize",
        "nothing for an optimizer; work.wait() for a handle",
        "DDP has waited when backward() returns.",
        "synchronize",
        special=True,
    ),
    Rule(
        "skip_synchronize",
        "what stands in the block",
        "There is no wait in step() that could be left out.",
        "synchronize",
        special=True,
    ),
    Rule(
        "allreduce",
        "{x}",
        "torch.distributed reduces in place, so on a copy, without its graph. Gloo has no average: sum, then "
        "divide.",
        "allreduce",
        lines=("{x} = {copy}", SUM, AVERAGE),
        signature=REDUCED,
        shows="loss",
    ),
    Rule(
        "allreduce_",
        "{x}",
        "In place, as it was.",
        "in place",
        lines=("{x} = {tensor}", SUM, AVERAGE),
        signature="tensor average name op",
    ),
    Rule(
        "grouped_allreduce",
        "{x}",
        "One after the other.",
        "grouped",
        lines=(
            "{x} = [tensor.detach().clone() for tensor in {tensors}]",
            "for tensor in {x}:\n    dist.all_reduce(tensor{op})\n    tensor{divided}",
        ),
        signature="tensors average name compression op",
    ),
    Rule(
        "grouped_allreduce_",
        "{x}",
        "One after the other, in place.",
        "grouped",
        lines=("{x} = {tensors}", "for tensor in {x}:\n    dist.all_reduce(tensor{op})\n    tensor{divided}"),
        signature="tensors average name op",
    ),
    Rule(
        "allgather",
        "torch.cat({x}).to({tensor:name}.device)",
        "By objects: tensors of ranks may differ in their first size, which all_gather does not take.",
        "allgather",
        lines=(OBJECTS, "dist.all_gather_object({x}, {tensor:name}.detach().cpu())"),
        signature="tensor name",
    ),
    Rule(
        "grouped_allgather",
        "{x}",
        "One after the other, by objects.",
        "grouped",
        lines=(
            "{x} = []",
            "for tensor in {tensors}:\n    parts = [None] * dist.get_world_size()\n"
            "    dist.all_gather_object(parts, tensor.detach().cpu())\n"
            "    {x}.append(torch.cat(parts).to(tensor.device))",
        ),
        signature="tensors name",
    ),
    Rule(
        "broadcast",
        "{x}",
        "torch.distributed writes into the tensor, so on a copy.",
        "broadcast",
        lines=("{x} = {copy}", "dist.broadcast({x}, src={root_rank})"),
        signature="tensor root_rank name",
    ),
    Rule(
        "broadcast_",
        "{x}",
        "In place, as it was.",
        "in place",
        lines=("{x} = {tensor}", "dist.broadcast({x}, src={root_rank})"),
        signature="tensor root_rank name",
    ),
    Rule(
        "reducescatter",
        "{x}.tensor_split(dist.get_world_size())[dist.get_rank()]",
        "By a sum of all: the parts of ranks may differ by one row, which reduce_scatter does not take.",
        "reducescatter",
        lines=("{x} = {copy}", SUM, AVERAGE),
        signature="tensor name compression op",
    ),
    Rule(
        "grouped_reducescatter",
        "[tensor.tensor_split(dist.get_world_size())[dist.get_rank()] for tensor in {x}]",
        "One after the other, by sums of all.",
        "grouped",
        lines=(
            "{x} = [tensor.detach().clone() for tensor in {tensors}]",
            "for tensor in {x}:\n    dist.all_reduce(tensor{op})\n    tensor{divided}",
        ),
        signature="tensors name compression op",
    ),
    Rule(
        "alltoall",
        "{x}",
        "Equal parts to all; with `splits` it is left.",
        "alltoall",
        lines=("{x} = torch.empty_like({tensor:name})", "dist.all_to_all_single({x}, {tensor:name})"),
        signature="tensor splits name",
    ),
    Rule(
        "broadcast_object",
        "{x}[0]",
        "Objects travel in a list, as pickles.",
        "objects",
        lines=("{x} = [{obj}]", "dist.broadcast_object_list({x}, src={root_rank})"),
        signature="obj root_rank name",
    ),
    Rule(
        "allgather_object",
        "{x}",
        "A list by ranks.",
        "objects",
        lines=(OBJECTS, "dist.all_gather_object({x}, {obj})"),
        signature="obj name",
    ),
    Rule("barrier", "dist.barrier()", "The same.", "world"),
    Rule(
        "allreduce_async allreduce_async_ broadcast_async broadcast_async_ alltoall_async",
        "as without _async, with async_op=True; work.wait() where synchronize(handle) was",
        "A handle that is a variable, waited for in the same function; others are left.",
        "handles",
        special=True,
    ),
    Rule(
        "SyncBatchNorm",
        "torch.nn.SyncBatchNorm",
        "The same statistics; PyTorch's weighs ranks by their samples, too.",
        "batch norm",
    ),
    Rule(
        "join",
        "with Join([ddp_model]): around the loop before it",
        "Ranks that are done count as zeros, divided by all ranks, in both.",
        "join",
        special=True,
    ),
    Rule(
        "elastic.ElasticSampler",
        "torch.utils.data.DistributedSampler",
        "Without elastic.run and `record_batch` it does no more.",
        "elastic sampler",
        signature="dataset shuffle seed",
        special=True,
        shows="samples",
    ),
    Rule(
        "horovodrun",
        "torchrun --nproc-per-node 4 train.py, in shell scripts and READMEs beside it",
        "Each starts the processes of one machine; with hosts or more options it is left.",
        "horovodrun",
        special=True,
    ),
)
BY_NAME = {name: rule for rule in RULES for name in rule.names.split()}

BY_HAND = {
    "Adasum": "torch.distributed has no Adasum: average, and scale the learning rate anew",
    "ProcessSet": "make a group by dist.new_group(ranks), and give it to the collectives: group=...",
    "add_process_set": "make a group by dist.new_group(ranks), and give it to the collectives: group=...",
    "elastic": "start by torchrun --max-restarts, and load the last checkpoint at the start",
    "start_timeline": "record a trace by torch.profiler",
    "stop_timeline": "record a trace by torch.profiler",
    "init": "make a group by dist.new_group(ranks), and give it to the collectives: group=...",
    "run": "start the script by torchrun --nproc-per-node N",
    "Compression": "write a hook for ddp_model.register_comm_hook",
}
"""What has no counterpart, by the first part of its name, and what to do instead."""
OTHERWISE = "write it with torch.distributed"
