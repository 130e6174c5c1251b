"""The network of FID: sizes as they are known, and the two details in which it differs from other ports."""

import torch

from osfl.models.inception import FEATURES, Inception


def test_it_has_the_known_size_and_names() -> None:
    with torch.device("meta"):
        network = Inception()
    state = network.state_dict()
    assert sum(p.numel() for p in network.parameters()) == 21_785_568  # 23,834,568 with a head for 1,000 classes
    assert state["Mixed_6b.branch7x7dbl_3.conv.weight"].shape == (128, 128, 1, 7)
    assert state["Mixed_7c.branch3x3dbl_3b.conv.weight"].shape == (384, 384, 3, 1)
    assert {"Conv2d_1a_3x3.bn.running_var", "Mixed_6a.branch3x3.conv.weight", "Mixed_7a.branch7x7x3_4.bn.bias"} <= set(state)
    with torch.device("meta"):
        assert network.eval()(torch.zeros(2, 3, 299, 299)).shape == (2, FEATURES)


def test_averages_leave_the_padding_out_and_the_last_block_takes_the_maximum() -> None:
    network = Inception()
    ones, ramp = torch.ones(1, 1, 4, 4), torch.arange(16.0).view(1, 1, 4, 4)
    assert torch.equal(network.Mixed_5b.pool(ones), ones)  # with padding, corners would be 4/9
    assert torch.equal(network.Mixed_7b.pool(ones), ones)
    assert float(network.Mixed_7c.pool(ramp)[0, 0, 0, 0]) == 5.0
