"""The checks of what the user passed."""

from __future__ import annotations

import pytest
import torch

from torchmpi_plugin.tensors import arguments

SHAPE = (4, 6)


def numbers() -> torch.Tensor:
    return torch.arange(24.0).reshape(SHAPE)


#: Every way in which a tensor's elements can lie in memory without being in order.
LAYOUTS = {
    "transposed": lambda: torch.arange(24.0).reshape(6, 4).t(),
    "every second column": lambda: torch.arange(48.0).reshape(4, 12)[:, ::2],
    "channels last": lambda: torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "conjugated": lambda: torch.complex(numbers(), numbers()).conj(),
    "negated": lambda: torch.complex(numbers(), numbers()).conj().imag,
}


class TestTensors:
    def test_dense_cpu_tensors_pass(self) -> None:
        tensor = numbers()
        assert arguments.check(tensor, "op") is tensor
        assert arguments.single([tensor], "op") is tensor
        assert arguments.single(tensor, "op") is tensor

    @pytest.mark.parametrize("thing", [None, 1, [1.0], "tensor"])
    def test_other_things(self, thing: object) -> None:
        with pytest.raises(TypeError, match=rf"broadcast: .*torch.Tensor, not {type(thing).__name__}"):
            arguments.check(thing, "broadcast")

    def test_another_device(self) -> None:
        with pytest.raises(ValueError, match=r"broadcast: .*on meta"):
            arguments.check(torch.ones(3, device="meta"), "broadcast")

    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
    @pytest.mark.parametrize("convert", ["to_sparse_coo", "to_sparse_csr"])
    def test_sparse_where_dense_is_wanted(self, convert: str) -> None:
        with pytest.raises(ValueError, match=r"broadcast: expected a dense tensor.*sparse"):
            arguments.check(getattr(torch.eye(3), convert)(), "broadcast")

    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
    def test_sparse_where_it_may_be(self) -> None:
        coo, csr = torch.eye(3).to_sparse_coo(), torch.eye(3).to_sparse_csr()
        assert arguments.check(coo, "op", sparse=True) is coo
        with pytest.raises(ValueError, match="dense"):
            arguments.check(csr, "op", sparse=True)

    @pytest.mark.parametrize("count", [0, 2])
    def test_one_tensor_per_rank(self, count: int) -> None:
        with pytest.raises(ValueError, match=f"one tensor per rank, not {count}"):
            arguments.single([numbers()] * count, "op")


class TestMemory:
    def test_tensors_in_order_are_used_as_they_are(self) -> None:
        tensor = numbers()
        assert arguments.readable(tensor) is tensor
        buffer, finish = arguments.writable(tensor, "op")
        assert buffer is tensor
        assert finish is None

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_reading(self, layout: str) -> None:
        tensor = LAYOUTS[layout]()
        buffer = arguments.readable(tensor)
        assert buffer.is_contiguous()
        assert not buffer.is_conj()
        assert not buffer.is_neg()
        assert torch.equal(buffer, tensor)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("load", [False, True])
    def test_writing(self, layout: str, load: bool) -> None:
        tensor = LAYOUTS[layout]()
        before = tensor.clone()
        buffer, finish = arguments.writable(tensor, "op", load=load)
        assert buffer.is_contiguous()
        assert finish is not None
        if load:
            assert torch.equal(buffer, before)
        buffer.copy_(before.clone() + 1)
        assert torch.equal(tensor, before), "written before the operation was complete"
        finish()
        assert torch.equal(tensor, before + 1)

    def test_writing_where_autograd_watches(self) -> None:
        leaf = torch.zeros(6, 4, requires_grad=True)
        buffer, finish = arguments.writable(leaf.t(), "op")
        buffer.fill_(2.0)
        assert finish is not None
        finish()
        assert leaf.detach().unique().tolist() == [2.0]

    @pytest.mark.parametrize("load", [False, True])
    def test_elements_that_share_memory_cannot_be_written(self, load: bool) -> None:
        with pytest.raises(ValueError, match=r"all_reduce: .*share memory.*clone"):
            arguments.writable(torch.zeros(1).expand(4), "all_reduce", load=load)
        assert arguments.readable(torch.ones(1).expand(4)).tolist() == [1.0] * 4

    @pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,)])
    def test_bytes(self, shape: tuple[int, ...]) -> None:
        tensor = torch.ones(shape, dtype=torch.float64)
        assert arguments.bytes_of(tensor) == 8 * tensor.numel()


class TestNumbers:
    @pytest.mark.parametrize("check", [arguments.check_root, arguments.check_peer])
    def test_ranks(self, check) -> None:
        assert [check(rank, 3, "op") for rank in range(3)] == [0, 1, 2]
        for rank in (-1, 3, 2**31):
            with pytest.raises(ValueError, match=rf"op: .*{rank}.*0 to 2"):
                check(rank, 3, "op")

    def test_tags(self) -> None:
        assert [arguments.check_tag(tag, 9, "op") for tag in (0, 9)] == [0, 9]
        for tag in (-1, 10):
            with pytest.raises(ValueError, match=rf"op: tag {tag} .*0 to 9"):
                arguments.check_tag(tag, 9, "op")

    def test_counts(self) -> None:
        arguments.check_count(3, 3, "the list", "op")
        with pytest.raises(ValueError, match=r"op: the list must have 3 entries.* not 2"):
            arguments.check_count(2, 3, "the list", "op")

    def test_dtypes(self) -> None:
        arguments.check_alike(torch.ones(1), torch.ones(2), "op")
        with pytest.raises(TypeError, match=r"op: .*float32.*int64"):
            arguments.check_alike(torch.ones(1, dtype=torch.int64), torch.ones(1), "op")

    def test_lengths(self) -> None:
        arguments.check_numel(numbers(), 24, "the output", "op")
        with pytest.raises(ValueError, match="op: the output must have 23 elements, not 24"):
            arguments.check_numel(numbers(), 23, "the output", "op")
        arguments.check_numel_pair(2, 2, "op")
        with pytest.raises(ValueError, match=r"op: .*itself 2 .*expects 3"):
            arguments.check_numel_pair(2, 3, "op")


class TestSplitSizes:
    @pytest.mark.parametrize(
        ("sizes", "shape", "ranks", "elements"),
        [
            ((), (6, 2), 3, [4, 4, 4]),
            ((), (0, 5), 2, [0, 0]),
            ([1, 0, 3], (4, 5), 3, [5, 0, 15]),
            ([4], (4,), 1, [4]),
            ([0, 0], (0,), 2, [0, 0]),
            ([2, 2], (4, 0), 2, [0, 0]),
        ],
    )
    def test_elements_for_each_rank(self, sizes, shape, ranks: int, elements: list[int]) -> None:
        assert arguments.split_sizes(sizes, torch.ones(shape), ranks, "input", "op") == elements

    @pytest.mark.parametrize(
        ("sizes", "shape", "ranks", "message"),
        [
            ((), (5,), 2, r"\(5\) cannot be divided by 2 ranks"),
            ([2, 2], (5,), 2, r"\[2, 2\] do not add up to .*\(5\)"),
            ([6, -1], (5,), 2, "do not add up"),
            ([5], (5,), 2, "must have 2 entries"),
            ([1, 1], (), 2, "do not add up"),
        ],
    )
    def test_what_cannot_be(self, sizes, shape, ranks: int, message: str) -> None:
        with pytest.raises(ValueError, match=f"op: .*{message}"):
            arguments.split_sizes(sizes, torch.ones(shape), ranks, "input", "op")


def test_all_of() -> None:
    done: list[int] = []
    assert arguments.all_of([]) is None
    assert arguments.all_of([None, None]) is None
    finish = arguments.all_of([lambda: done.append(1), None, lambda: done.append(2)])
    assert finish is not None
    assert not done
    finish()
    assert done == [1, 2]
