"""Every feature, those of add-ons too: the classes derived from `Feature` in all feature.py. To add
one, write megatron/features/NAME/feature.py or addons/NAME/feature.py; to delete it, its folder."""

from megatron import addons
from megatron.config.tree import with_features
from megatron.features.own import OWN, features_in

FEATURES = (*OWN, *features_in(addons.modules("feature")))
RunConfig = with_features(FEATURES)  # all flags of pretrain_gpt.py
READERS = tuple(feature.read_points for feature in FEATURES)  # of what they wrote of a run
