"""Names and shapes of published weights, one module for each family of encoders; see `encoders.weights`."""

from encoders.formats import navit as navit
from encoders.formats import sam_vit as sam_vit
from encoders.formats import swin as swin
from encoders.formats import twins as twins
from encoders.formats import vit as vit
