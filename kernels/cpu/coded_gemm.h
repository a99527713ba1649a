// Products of more than a few rows with a weight in codes.
#pragma once
#include "codes.h"

int NAME(coded_gemm)(const scalar *x, const coded *weight, const scalar *bias, void *y, long rows, long outputs, long columns, long x_stride,
                     int wide_output, int threads);
