import pytest
import torch

ALL_THREADS = torch.get_num_threads()


@pytest.fixture(autouse=True)
def threads(request):
    """Tiny tensors on one thread, where the hand-over between threads would cost more than the arithmetic."""
    torch.set_num_threads(ALL_THREADS if request.node.get_closest_marker("real") else 1)
