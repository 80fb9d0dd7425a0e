"""What a model's layers keep of every position: said layer by layer, or read from the model's configuration.

A window is the number of positions that a query sees, itself included, here and everywhere in the package. That is what
``sliding_window`` means in transformers' masks; None sees all.

Examples
--------
>>> from pagedkv.shapes import group_layers, layer_shapes
>>> gemma = {"model_type": "gemma3_text", "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1,
...          "head_dim": 256, "sliding_window": 512}
>>> for shape, layers in group_layers(layer_shapes(gemma)).items():
...     print(shape.window, shape.n_kv_heads, shape.head_dim, len(layers))
512 1 256 15
None 1 256 3
"""

from pagedkv.shapes.layers import LayerShape, ModelShapes, group_layers
from pagedkv.shapes.reading import layer_shapes, model_shapes, window_of

__all__ = ["LayerShape", "ModelShapes", "group_layers", "layer_shapes", "model_shapes", "window_of"]
