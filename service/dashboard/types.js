// The shapes that the service answers with, for editors and readers; there is nothing in here at run time.

/**
 * @typedef {Object} Progress sizes in bytes of output
 * @property {number} bytes_done
 * @property {number} bytes_total
 * @property {number} bytes_read
 * @property {number} bytes_merged
 * @property {number} tensors_done
 * @property {number} tensors_total
 * @property {number} files_done
 * @property {number} files_total
 * @property {number | null} bytes_per_s
 * @property {number | null} eta_s
 * @property {Record<string, string>} workers
 * @property {Record<string, [number, number][]>} [written] byte ranges that are done, of the files under way
 */

/**
 * @typedef {Object} JobError
 * @property {"input" | "destination" | "resource" | "internal" | "timeout"} kind
 * @property {string} type
 * @property {string} message
 * @property {string} hint
 * @property {string | null} file
 * @property {string | null} tensor
 * @property {string | null} expected
 * @property {string | null} found
 */

/**
 * @typedef {Object} Job
 * @property {string} id
 * @property {string} state
 * @property {string} source
 * @property {string} destination
 * @property {Record<string, unknown>} options
 * @property {Record<string, string>} labels
 * @property {number} priority
 * @property {string} created_at
 * @property {string} updated_at
 * @property {Record<string, string>} state_times
 * @property {number} attempt
 * @property {Progress | null} progress
 * @property {JobError | null} error
 * @property {string[]} warnings
 * @property {{location: string, files: {path: string, size_bytes: number, digest: string}[], bytes: number, bytes_read: number, seconds: number, digest: string} | null} result
 * @property {Record<string, string>} links
 */

/**
 * @typedef {Object} Shard
 * @property {number} position
 * @property {string} path
 * @property {number} size_bytes
 * @property {number} tensors
 * @property {"pending" | "done"} state
 * @property {string | null} digest
 * @property {string | null} finished_at
 */

/**
 * @typedef {Object} Tensor
 * @property {number} position
 * @property {string} name
 * @property {string} dtype
 * @property {number[]} shape
 * @property {string} file
 * @property {number} offset
 * @property {number} size_bytes
 * @property {string[]} sources
 * @property {string} operation
 * @property {"pending" | "done"} state
 */

export {};
