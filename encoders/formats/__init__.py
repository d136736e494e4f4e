"""Names and shapes of published weights, one module for each family of encoders; see `encoders.weights`."""

from encoders.formats import vit as vit
