"""An ``experimental.custom_import`` that marks stock torchtitan's validator, so that no run-time repair touches it."""

from torchtitan.components.validate import Validator

Validator.validation_labels_counted = True
