"""The functions in the graph: thin shells that may run twice, anywhere, and change nothing by it.

Arguments and results are small records; latents, images and weights stay in the stores. The engine
is reached through `spotlight.device.protocol`, so a process that only builds graphs never imports torch.
"""
