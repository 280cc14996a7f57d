/* torch's element types: one row each, which every table of types is made from, their numbers (reduce.h) too.
 *
 *   torch, mpi   names. The MPI type is given where MPI is handed that type to reduce; the others are converted to one
 *                of these first. Data that is only moved travels as bytes.
 *   size         in bytes
 *   wide         the type in which elements are computed, see mpp_wide_dtype
 *   real         the type of a complex one's parts; else itself
 *   is_float     no integer
 *   is_short     an integer that MPI is handed as a longer one, see mpi_representation.h */
#pragma once

/* code, torch, mpi, size, wide, real, is_float, is_short */
#define MPP_DTYPES(X)                                                                                                  \
    X(BOOL, "bool", NULL, 1, U8, BOOL, 0, 0)                                                                           \
    X(U8, "uint8", "UINT8_T", 1, U8, U8, 0, 1)                                                                         \
    X(I8, "int8", "INT8_T", 1, I8, I8, 0, 1)                                                                           \
    X(U16, "uint16", "UINT16_T", 2, U16, U16, 0, 1)                                                                    \
    X(I16, "int16", "INT16_T", 2, I16, I16, 0, 1)                                                                      \
    X(U32, "uint32", "UINT32_T", 4, U32, U32, 0, 0)                                                                    \
    X(I32, "int32", "INT32_T", 4, I32, I32, 0, 0)                                                                      \
    X(U64, "uint64", "UINT64_T", 8, U64, U64, 0, 0)                                                                    \
    X(I64, "int64", "INT64_T", 8, I64, I64, 0, 0)                                                                      \
    X(F16, "float16", NULL, 2, F32, F16, 1, 0)                                                                         \
    X(BF16, "bfloat16", NULL, 2, F32, BF16, 1, 0)                                                                      \
    X(F32, "float32", "FLOAT", 4, F32, F32, 1, 0)                                                                      \
    X(F64, "float64", "DOUBLE", 8, F64, F64, 1, 0)                                                                     \
    X(CHALF, "complex32", NULL, 4, CFLOAT, F16, 1, 0)                                                                  \
    X(CFLOAT, "complex64", "C_FLOAT_COMPLEX", 8, CFLOAT, F32, 1, 0)                                                    \
    X(CDOUBLE, "complex128", "C_DOUBLE_COMPLEX", 16, CDOUBLE, F64, 1, 0)                                               \
    X(F8_E4M3FN, "float8_e4m3fn", NULL, 1, F32, F8_E4M3FN, 1, 0)                                                       \
    X(F8_E4M3FNUZ, "float8_e4m3fnuz", NULL, 1, F32, F8_E4M3FNUZ, 1, 0)                                                 \
    X(F8_E5M2, "float8_e5m2", NULL, 1, F32, F8_E5M2, 1, 0)                                                             \
    X(F8_E5M2FNUZ, "float8_e5m2fnuz", NULL, 1, F32, F8_E5M2FNUZ, 1, 0)

/* MPI's names of the operations. */
#define MPP_REDOPS(X) X(SUM) X(PROD) X(MIN) X(MAX) X(BAND) X(BOR) X(BXOR)
