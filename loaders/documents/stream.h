/* SPDX-License-Identifier: Apache-2.0
 *
 * The data interface over datasets of samples.
 */
#ifndef DOCUMENTS_STREAM_H
#define DOCUMENTS_STREAM_H

#include <megatrain/loader.h>

mt_status stream_open(const mt_data_request *request, void **ret_stream);
void stream_close(void *stream);
void stream_size(const void *stream, int64_t *ret_documents, int64_t *ret_tokens);
mt_status stream_next(void *stream, mt_document *ret);
void stream_tell(const void *stream, int64_t *ret_epoch, int64_t *ret_index);
mt_status stream_seek(void *stream, int64_t epoch, int64_t index);
int64_t stream_vocab_size(const void *stream);
uint64_t stream_fingerprint(const void *stream);

#endif
