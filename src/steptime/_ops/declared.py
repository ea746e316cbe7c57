"""What ATen ops take, as PyTorch 2.11 declares it, in a short notation: overloads of ops that launch device work.

A line is an overload and the types of its arguments; those behind `*` are given by name. `T` tensor, `S` number, `i` integer,
`f` float, `b` truth value, `s` text; `[]` a list, `[2]` one for which a single default number stands for all, `?` may be
missing, `!` is written. `OPTIONS` and `SCALER` stand for arguments that many ops share. What is made of other ops is not here.
"""

from __future__ import annotations

SHARED = {
    "OPTIONS": "dtype:dtype?=None layout:layout?=None device:device?=None pin_memory:b?=None",
    "SCALER": "grad_scale:T?=None found_inf:T?=None",
}

DECLARED = """
_adaptive_avg_pool2d.default T i[2]
_adaptive_avg_pool2d_backward.default T T
_amp_foreach_non_finite_check_and_unscale_.default T[]! T! T
_embedding_bag.default T T T b=False i=0 b=False T?=None b=False i=-1
_embedding_bag_backward.default T T T T T T i b i b T? i=-1
_embedding_bag_dense_backward.default T T T T T i b i T? i=-1
_foreach_add.List T[] T[] * alpha:S=1
_foreach_add.Scalar T[] S
_foreach_add.ScalarList T[] S[]
_foreach_add.Tensor T[] T * alpha:S=1
_foreach_add_.List T[]! T[] * alpha:S=1
_foreach_add_.Scalar T[]! S
_foreach_add_.ScalarList T[]! S[]
_foreach_add_.Tensor T[]! T * alpha:S=1
_foreach_addcdiv_.Scalar T[]! T[] T[] S=1
_foreach_addcdiv_.ScalarList T[]! T[] T[] S[]
_foreach_addcdiv_.Tensor T[]! T[] T[] T
_foreach_addcmul_.Scalar T[]! T[] T[] S=1
_foreach_addcmul_.ScalarList T[]! T[] T[] S[]
_foreach_addcmul_.Tensor T[]! T[] T[] T
_foreach_copy_.default T[]! T[] b=False
_foreach_div_.List T[]! T[]
_foreach_div_.Scalar T[]! S
_foreach_div_.ScalarList T[]! S[]
_foreach_div_.Tensor T[]! T
_foreach_lerp_.List T[]! T[] T[]
_foreach_lerp_.Scalar T[]! T[] S
_foreach_lerp_.ScalarList T[]! T[] S[]
_foreach_mul.List T[] T[]
_foreach_mul.Scalar T[] S
_foreach_mul.ScalarList T[] S[]
_foreach_mul.Tensor T[] T
_foreach_mul_.List T[]! T[]
_foreach_mul_.Scalar T[]! S
_foreach_mul_.ScalarList T[]! S[]
_foreach_mul_.Tensor T[]! T
_foreach_norm.Scalar T[] S=2 dtype?=None
_foreach_sqrt.default T[]
_foreach_zero_.default T[]!
_fused_adagrad_.default T[]! T[]! T[]! T[]! * lr:f lr_decay:f weight_decay:f eps:f maximize:b SCALER
_fused_adam_.default T[]! T[]! T[]! T[]! T[]! T[] * lr:f beta1:f beta2:f weight_decay:f eps:f amsgrad:b maximize:b SCALER
_fused_adamw_.default T[]! T[]! T[]! T[]! T[]! T[] * lr:f beta1:f beta2:f weight_decay:f eps:f amsgrad:b maximize:b SCALER
_fused_rms_norm.default T i[] T? f?
_fused_rms_norm_backward.default T T i[] T T? b[2]
_fused_sgd_.default T[]! T[]! T[]! * weight_decay:f momentum:f lr:f dampening:f nesterov:b maximize:b is_first_step:b SCALER
_index_put_impl_.default T! T?[] T b=False b=False
_local_scalar_dense.default T
_log_softmax.default T i b
_log_softmax_backward_data.default T T i dtype
_safe_softmax.default T i dtype?=None
_scaled_dot_product_attention_math.default T T T T?=None f=0.0 b=False T?=None * scale:f?=None enable_gqa:b=False
_scaled_dot_product_cudnn_attention.default T T T T? b f=0.0 b=False b=False * scale:f?=None
_scaled_dot_product_cudnn_attention_backward.default T T T T T T T T T T T i i f b * scale:f?=None
_scaled_dot_product_efficient_attention.default T T T T? b f=0.0 b=False * scale:f?=None
_scaled_dot_product_efficient_attention_backward.default T T T T T T T T T f b[4] b=False * scale:f?=None
_scaled_dot_product_flash_attention.default T T T f=0.0 b=False b=False * scale:f?=None
_scaled_dot_product_flash_attention_backward.default T T T T T T T T i i f b T T * scale:f?=None
_softmax.default T i b
_softmax_backward_data.default T T i dtype
_to_copy.default T * OPTIONS non_blocking:b=False memory_format:format?=None
abs.default T
add.Scalar T S S=1
add.Tensor T T * alpha:S=1
add_.Scalar T! S S=1
add_.Tensor T! T * alpha:S=1
addcdiv.default T T T * value:S=1
addcdiv_.default T! T T * value:S=1
addcmul.default T T T * value:S=1
addcmul_.default T! T T * value:S=1
addmm.default T T T * beta:S=1 alpha:S=1
addmm.dtype T T T dtype * beta:S=1 alpha:S=1
amax.default T i[1]=[] b=False
arange.default S * OPTIONS
arange.start_step S S S=1 * OPTIONS
argmax.default T i?=None b=False
avg_pool2d.default T i[2] i[2]=[] i[2]=0 b=False b=True i?=None
avg_pool2d_backward.default T T i[2] i[2] i[2] b b i?
avg_pool2d_backward.grad_input T T i[2] i[2] i[2] b b i? * grad_input:T!
baddbmm.default T T T * beta:S=1 alpha:S=1
baddbmm.dtype T T T dtype * beta:S=1 alpha:S=1
bernoulli_.Tensor T! T * generator:generator?=None
bernoulli_.float T! f=0.5 * generator:generator?=None
binary_cross_entropy.default T T T?=None i=1
binary_cross_entropy_backward.default T T T T? i=1
binary_cross_entropy_backward.grad_input T T T T?=None i=1 * grad_input:T!
binary_cross_entropy_with_logits.default T T T?=None T?=None i=1
bitwise_and.Scalar T S
bitwise_and.Scalar_Tensor S T
bitwise_and.Tensor T T
bmm.default T T
bmm.dtype T T dtype
cat.default T[] i=0
clamp.default T S?=None S?=None
clamp.Tensor T T?=None T?=None
clamp_min.default T S
clamp_min.Tensor T T
clone.default T * memory_format:format?=None
constant_pad_nd.default T i[] S=0
convolution.default T T T? i[] i[] i[] b i[] i
convolution_backward.default T T T i[]? i[] i[] i[] b i[] i b[3]
copy_.default T! T b=False
cos.default T
cudnn_batch_norm.default T T T? T? T? b f f
cudnn_batch_norm_backward.default T T T T? T? T? T? f T
cumsum.default T i * dtype:dtype?=None
div.Scalar T S
div.Scalar_mode T S * rounding_mode:s?
div.Tensor T T
div.Tensor_mode T T * rounding_mode:s?
div_.Scalar T! S
div_.Scalar_mode T! S * rounding_mode:s?
div_.Tensor T! T
div_.Tensor_mode T! T * rounding_mode:s?
embedding.default T T i=-1 b=False b=False
embedding_dense_backward.default T T i i b
eq.Scalar T S
eq.Tensor T T
erf.default T
exp.default T
fill_.Scalar T! S
fill_.Tensor T! T
flip.default T i[]
full_like.default T S * OPTIONS memory_format:format?=None
gather.default T i T * sparse_grad:b=False
ge.Scalar T S
ge.Tensor T T
gelu.default T * approximate:s=none
gelu_backward.default T T * approximate:s=none
gelu_backward.grad_input T T * approximate:s=none grad_input:T!
gt.Scalar T S
gt.Tensor T T
hardswish.default T
hardswish_backward.default T T
hardtanh.default T S=-1 S=1
hardtanh_backward.default T T S S
hardtanh_backward.grad_input T T S S * grad_input:T!
index.Tensor T T?[]
index_add.default T i T T * alpha:S=1
index_add_.default T! i T T * alpha:S=1
index_put.default T T?[] T b=False
index_put_.default T! T?[] T b=False
index_select.default T i T
leaky_relu.default T S=0.01
leaky_relu_backward.default T T S b
leaky_relu_backward.grad_input T T S b * grad_input:T!
lerp.Scalar T T S
lerp.Tensor T T T
lerp_.Scalar T! T S
lerp_.Tensor T! T T
linalg_vector_norm.default T S=2 i[1]?=None b=False * dtype:dtype?=None
log.default T
logical_not.default T
lt.Scalar T S
lt.Tensor T T
masked_fill.Scalar T T S
masked_fill.Tensor T T T
masked_fill_.Scalar T! T S
masked_fill_.Tensor T! T T
max.default T
max.dim T i b=False
max_pool2d_with_indices.default T i[2] i[2]=[] i[2]=0 i[2]=1 b=False
max_pool2d_with_indices_backward.default T T i[2] i[2] i[2] i[2] b T
max_pool2d_with_indices_backward.grad_input T T i[2] i[2] i[2] i[2] b T * grad_input:T!
mean.default T * dtype:dtype?=None
mean.dim T i[1]? b=False * dtype:dtype?=None
mm.default T T
mm.dtype T T dtype
mse_loss.default T T i=1
mse_loss_backward.default T T T i
mse_loss_backward.grad_input T T T i * grad_input:T!
mul.Scalar T S
mul.Tensor T T
mul.out T T * out:T!
mul_.Scalar T! S
mul_.Tensor T! T
native_batch_norm.default T T? T? T? T? b f f
native_batch_norm_backward.default T T T? T? T? T? T? b f b[3]
native_dropout.default T f b?
native_dropout_backward.default T T f
native_group_norm.default T T? T? i i i i f
native_group_norm_backward.default T T T T T? i i i i b[3]
native_layer_norm.default T i[] T? T? f
native_layer_norm_backward.default T T i[] T T T? T? b[3]
ne.Scalar T S
ne.Tensor T T
neg.default T
new_zeros.default T i[] * OPTIONS
nll_loss2d_backward.default T T T T? i i T
nll_loss2d_backward.grad_input T T T T? i i T * grad_input:T!
nll_loss2d_forward.default T T T? i i
nll_loss_backward.default T T T T? i i T
nll_loss_backward.grad_input T T T T? i i T * grad_input:T!
nll_loss_forward.default T T T? i i
normal_.default T! f=0.0 f=1.0 * generator:generator?=None
ones_like.default T * OPTIONS memory_format:format?=None
pow.Scalar S T
pow.Tensor_Scalar T S
pow.Tensor_Tensor T T
reciprocal.default T
relu.default T
relu_.default T!
remainder.Scalar T S
remainder.Scalar_Tensor S T
remainder.Tensor T T
repeat.default T i[]
roll.default T i[1] i[1]=[]
rsqrt.default T
scalar_tensor.default S * OPTIONS
scatter.reduce T i T T * reduce:s
scatter.src T i T T
scatter.value T i T S
scatter.value_reduce T i T S * reduce:s
scatter_.reduce T! i T T * reduce:s
scatter_.src T! i T T
scatter_.value T! i T S
scatter_.value_reduce T! i T S * reduce:s
scatter_add.default T i T T
scatter_add_.default T! i T T
select_backward.default T i[] i i
sigmoid.default T
sigmoid_backward.default T T
sigmoid_backward.grad_input T T * grad_input:T!
silu.default T
silu_.default T!
silu_backward.default T T
silu_backward.grad_input T T * grad_input:T!
sin.default T
slice_backward.default T i[] i i i i
softplus.default T S=1 S=20
softplus_backward.default T T S S
softplus_backward.grad_input T T S S * grad_input:T!
sort.default T i=-1 b=False
sort.stable T * stable:b? dim:i=-1 descending:b=False
split_with_sizes_copy.default T i[] i=0
sqrt.default T
sqrt_.default T!
stack.default T[] i=0
sub.Scalar T S S=1
sub.Tensor T T * alpha:S=1
sub_.Scalar T! S S=1
sub_.Tensor T! T * alpha:S=1
sum.default T * dtype:dtype?=None
sum.dim_IntList T i[1]? b=False * dtype:dtype?=None
tanh.default T
tanh_backward.default T T
tanh_backward.grad_input T T * grad_input:T!
threshold_backward.default T T S
threshold_backward.grad_input T T S * grad_input:T!
topk.default T i i=-1 b=True b=True
tril.default T i=0
triu.default T i=0
uniform_.default T! f=0.0 f=1.0 * generator:generator?=None
where.self T T T
zero_.default T!
zeros.default i[] * OPTIONS
zeros_like.default T * OPTIONS memory_format:format?=None
"""
