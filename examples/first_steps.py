# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # First steps with vitrail
#
# Classify a photo, see what the model attends to, and train a Vision Transformer. Everything runs offline on a laptop
# without a GPU: the models, photos and training images are part of the package. Install it as the README says, and
# Jupyter with `pip install jupyterlab`.
#
# ## Classify a photo
#
# `cct_cifar10` is a compact convolutional transformer with 0.7 M parameters, trained on the ten classes of CIFAR-10.
# `example:cat` is one of eight photos in the package; a path, bytes, a Pillow image or an array work as well.

# %%
import matplotlib.pyplot as plt
from PIL import Image

import vitrail

predictor = vitrail.Predictor("cct_cifar10")
predictor.predict("example:cat", top=3)

# %% [markdown]
# ## See what it attends to
#
# The photo stays bright where patches contribute to the predicted class.

# %%
vitrail.Explainer(predictor).explain("example:cat")

# %% [markdown]
# ## Train a model
#
# A ViT with 0.1 M parameters learns 6,000 images of Fashion-MNIST from scratch. The recipe sets the optimizer, the
# learning rate and the augmentation. Six epochs take about 20 seconds on two CPU cores.

# %%
data = vitrail.open_data("fashion")
model = vitrail.create(
    "vit_tiny_patch16_224",
    image_size=28,
    patch_size=7,
    channels=1,
    classes=len(data.classes),
    width=64,
    depth=4,
    heads=2,
    mlp_width=128,
    pool="mean",
)
preprocessing = vitrail.Preprocessing(image_size=28, crop=1.0, mean=(0.5,), std=(0.5,))
recipe = vitrail.open_recipe("fashion").with_settings({"epochs": 6})
result = vitrail.fit(model, data, recipe, preprocessing=preprocessing)
print(result.evaluation)

# %% [markdown]
# ## Look at the curves

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3))
losses = [record for record in result.records if "loss" in record]
left.plot([record["epoch"] for record in losses], [record["loss"] for record in losses])
left.set(xlabel="epoch", title="training loss")
evaluations = [record for record in result.records if "val_top1" in record]
right.plot([record["epoch"] for record in evaluations], [100 * record["val_top1"] for record in evaluations], "o-")
right.set(xlabel="epoch", title="validation accuracy, %")
plt.show()

# %% [markdown]
# ## Save it and use it
#
# A saved model is a folder with `model.safetensors` and `config.json`. `vitrail predict`, `vitrail eval` and all other
# commands open it by its path.

# %%
vitrail.save(result.model, "my_first_vit", preprocessing=preprocessing, labels=data.classes)
assert data.val is not None
dress = Image.fromarray(data.val.source(3).squeeze())
vitrail.Explainer("my_first_vit").explain(dress)

# %% [markdown]
# ## Continue
#
# - `vitrail report my_first_vit --data fashion` writes a page about the model.
# - `vitrail train --data FOLDER --init vit_tiny_patch16_224` fine-tunes public weights on your photos, in
#   `FOLDER/CLASS/*.jpg`.
# - `vitrail export my_first_vit exported` writes an ONNX model that runs without torch. It needs the extra `export`: in
#   the clone, `pip install -c constraints.txt '.[export]'`.
